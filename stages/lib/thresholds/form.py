"""The form of a threshold; the thresholds themselves are in the other files of this folder."""

from typing import NamedTuple

Change = tuple[str, float]  # a key of params.yaml, and the factor for its value


class Threshold(NamedTuple):
    """A threshold for one metric, and the setting that is its bound.

    metric: dotted name in the metrics.json of a stage, or the difference of two such names.
    compare: `>=`, `>`, `<=`, or `within` (the absolute value is at most the bound).
    bound: key of gates.<gate> in params.yaml.
    name: of the metric, in words.
    why: reason for the default bound.
    fault: what is wrong if the metric fails: what follows "the reward model is at fault:".
    fix: what to do then; `{round}` is replaced by the round's name.
    default: of the bound; None if a threshold above has the same bound.
    description: of the bound.
    ge, gt, le: range of the bound.
    optional: null (not measured) passes.
    change: what to try first, if that is one setting.
    below_zero: fault and change of a negative value, if they are others.
    warns_with: key of a setting; where it is set, a failure is a warning and the check passes.
    """

    metric: str
    compare: str
    bound: str
    name: str
    why: str
    fault: str
    fix: str
    default: float | None = None
    description: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    optional: bool = False
    change: Change | None = None
    below_zero: tuple[str, Change] | None = None
    warns_with: str = ""
