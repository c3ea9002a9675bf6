"""The thresholds as the tables of docs/gates.md: `python -m stages.gate.thresholds` prints them."""

from stages.lib.core.params.gates import GatesParams
from stages.lib.thresholds import THRESHOLDS
from stages.lib.thresholds.form import Threshold

GATE_STAGES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "reward": ("reward", "battery"),
    "promote": ("evaluate", "ppo", "replay", "capability"),
}
"""The stages whose metrics.json a gate reads."""


def format_threshold(threshold: Threshold, bound: float) -> str:
    """The comparison as text: `>= 0.8`, or `within +-0.3`."""
    compare = "within +-" if threshold.compare == "within" else f"{threshold.compare} "
    return f"{compare}{bound:.4g}"


def advice(threshold: Threshold) -> str:
    """What is wrong if a metric fails, and what to do then."""
    return f"{threshold.fault}. {threshold.fix}"


def markdown(gate: str, gates: GatesParams) -> str:
    """The thresholds of a gate as a Markdown table."""
    rows = ["| metric | threshold | why | if it fails |", "|---|---|---|---|"]
    for threshold in THRESHOLDS[gate]:
        metric, key, why = threshold.metric, threshold.bound, threshold.why
        wanted = format_threshold(threshold, getattr(getattr(gates, gate), key))
        rows.append(
            f"| `{metric}` | {wanted}<br>`gates.{gate}.{key}` | {why} | {advice(threshold)} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    for name in THRESHOLDS:
        print(f"## {name}\n\n{markdown(name, GatesParams())}\n")
