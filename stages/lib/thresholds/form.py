"""The form of a threshold; the thresholds themselves are in the other files of this folder."""

from typing import NamedTuple


class Threshold(NamedTuple):
    """A threshold for one metric, and the setting that is its bound.

    metric: dotted name in the metrics.json of a stage, or the difference of two such names.
    compare: `>=`, `>`, `<=`, or `within` (the absolute value is at most the bound).
    bound: key of gates.<gate> in params.yaml.
    why: reason for the default bound.
    fix: what to do if the metric fails; `{round}` is replaced by the round's name.
    default: of the bound; None if a threshold above has the same bound.
    description: of the bound.
    ge, gt, le: range of the bound.
    optional: null (not measured) passes.
    """

    metric: str
    compare: str
    bound: str
    why: str
    fix: str
    default: float | None = None
    description: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    optional: bool = False
