"""Gate verdicts, read from the files that the gate stages write."""

import json
from typing import Any

from stages.gate.verdict import decision_message, format_check, values_by_metric
from stages.lib.core.files import REPORTS
from stages.lib.core.renamed import current_metrics


def read_gate(round_: str, gate: str) -> dict[str, Any] | None:
    """The verdict of a gate; None if the gate has not run."""
    path = REPORTS / round_ / f"gate_{gate}.json"
    return current_metrics(json.loads(path.read_text())) if path.exists() else None


def gate_message(round_: str, gate: str) -> str:
    """The failed checks of a gate, one per line: metric, value, threshold, next step.

    The last line names the decision that a person made or can make, if there is one. Empty if
    there is no verdict.
    """
    verdict = read_gate(round_, gate)
    if verdict is None:
        return ""
    lines = [f"gate {gate} of {round_} failed:", *failed_checks(verdict)]
    if decision := decision_message(verdict):
        lines.append(decision)
    return "\n".join(lines)


def failed_values(verdict: dict[str, Any]) -> dict[str, float | None]:
    """The values of the metrics that failed, for which a decision is valid."""
    return values_by_metric([check for check in verdict["checks"] if not check["passed"]])


def failed_checks(verdict: dict[str, Any]) -> list[str]:
    """One line per failed check: metric, value, threshold, next step."""
    return [
        f"{format_check(check)}. {check['next_step']}"
        for check in verdict["checks"]
        if not check["passed"]
    ]
