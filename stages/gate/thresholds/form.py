"""The form of a threshold; the thresholds themselves are in the other files of this folder."""

from typing import NamedTuple

GATE_STAGES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "reward": ("reward", "battery"),
    "promote": ("evaluate", "ppo", "replay", "capability"),
}
"""The stages whose metrics.json a gate reads."""


class Threshold(NamedTuple):
    """A threshold for one metric.

    metric: dotted name in the metrics.json of a stage, or the difference of two such names.
    compare: `>=`, `>`, `<=`, or `within` (the absolute value is at most the bound).
    bound: key of gates.<gate> in params.yaml.
    why: reason for the default bound.
    fix: what to do if the metric fails; `{round}` is replaced by the round's name.
    optional: null (not measured) passes.
    """

    metric: str
    compare: str
    bound: str
    why: str
    fix: str
    optional: bool = False


def format_threshold(threshold: Threshold, bound: float) -> str:
    """The comparison as text: `>= 0.8`, or `within +-0.3`."""
    compare = "within +-" if threshold.compare == "within" else f"{threshold.compare} "
    return f"{compare}{bound:.4g}"
