"""Gate verdicts, as the stages have written them."""

import json
from typing import Any

from stages.gate.verdict import decision_message, format_check
from stages.lib.core.files import REPORTS


def read_gate(round_: str, gate: str) -> dict[str, Any] | None:
    """The verdict of a gate, None when it has not been reached."""
    path = REPORTS / round_ / f"gate_{gate}.json"
    return json.loads(path.read_text()) if path.exists() else None


def gate_message(round_: str, gate: str) -> str:
    """The failed checks of a gate, one a line: metric, value, band, next step, and what can be
    decided; empty when there is no verdict.
    """
    verdict = read_gate(round_, gate)
    if verdict is None:
        return ""
    return "\n".join(
        [
            f"gate {gate} of {round_} failed:",
            *failed_checks(verdict),
            *filter(None, [decision_message(verdict)]),
        ]
    )


def failed_checks(verdict: dict[str, Any]) -> list[str]:
    return [
        f"{format_check(check)}. {check['next_step']}"
        for check in verdict["checks"]
        if not check["passed"]
    ]
