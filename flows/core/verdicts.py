"""Gate verdicts, read from the files that the gate stages write."""

from typing import Any

from pydantic import BaseModel

from stages.gate.approvals import Approval
from stages.gate.verdict import decision_message, failed_checks, values_by_metric
from stages.lib.core.files import REPORTS, read_object
from stages.lib.core.params.gates import Policy
from stages.lib.core.validation import check_type


class Check(BaseModel):
    metric: str
    name: str
    value: float | None
    threshold: str
    bound: str
    limit: float
    passed: bool
    fault: str
    next_step: str
    setting: str


class Verdict(BaseModel):
    """What is read of a verdict (stages/gate/verdict.py)."""

    gate: str
    round: str
    policy: Policy
    passed: bool
    may_continue: bool
    approval: Approval | None
    checks: list[Check]


def read_gate(round_: str, gate: str) -> dict[str, Any] | None:
    """The verdict of a gate; None if the gate has not run.

    Raises:
        BadInput: its file is damaged.
    """
    path = REPORTS / round_ / f"gate_{gate}.json"
    if not path.exists():
        return None
    fix = f"run `dvc repro -f gate_{gate}@{round_}` again"
    verdict = read_object(path, fix)
    check_type(Verdict, verdict, str(path), fix)
    return verdict


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
