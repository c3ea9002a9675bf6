"""Verdicts of gates in the form in which the gate stages write them."""

from typing import Any


def failed_check(
    metric: str, value: float | None, threshold: str, /, **words: Any
) -> dict[str, Any]:
    """A check that failed; `words` replaces single entries."""
    return {
        "metric": metric,
        "name": f"the {metric}",
        "value": value,
        "threshold": threshold,
        "bound": f"gates.sft.{metric}",
        "limit": float(threshold.split()[-1]),
        "passed": False,
        "fault": "it is bad",
        "next_step": "Look at the data",
        "setting": "",
    } | words


def passed_check(metric: str, value: float | None, threshold: str) -> dict[str, Any]:
    return failed_check(metric, value, threshold, passed=True, fault="", next_step="")
