"""Quality gates: `python -m stages.gate --gate sft|reward|promote --round r0`.

gates/<round>/<gate>.ok is written when the gate opens alone, so that neither `dvc repro` nor the
flow goes past a shut one (but nothing depends on `promote`: a policy that was hacked is what the
next round learns from). It opens when every number is in its band (stages/gate/thresholds.py), when
gates.<gate>.policy is `warn`, or when it is `ask` and a person has approved of these very numbers.
The verdict goes to reports/<round>/gate_<gate>.json in any case. No model is loaded here.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from stages.gate.approvals import read_approval
from stages.gate.thresholds import GATE_STAGES, THRESHOLDS, Threshold, format_threshold
from stages.lib.core.errors import GateFailed
from stages.lib.core.files import GATES, REPORTS, read_json, stage_dir, write_json, write_text
from stages.lib.core.params import Params
from stages.lib.core.params.gates import Policy

COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "within": lambda value, bound: abs(value) <= bound,
}
Check = dict[str, Any]
GateResult = dict[str, Any]


def look_up(metrics: Any, name: str) -> Any:
    """The value at a dotted name; NaN where there is none."""
    for key in name.split("."):
        metrics = metrics.get(key, math.nan) if isinstance(metrics, Mapping) else math.nan
    return metrics


def metric_value(metrics: Any, metric: str) -> float | None:
    """A metric, or the difference of two; NaN, which is in no band, where one is missing or no
    number; None where its stage wrote null.
    """
    values = [look_up(metrics, name) for name in metric.split(" - ")]
    if None in values:
        return None
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return math.nan
    return float(values[0] - sum(values[1:]))


def check(gate: str, band: Threshold, metrics: Any, bound: float, round_: str) -> Check:
    """One line of the verdict; NaN or infinity on either side fails it."""
    value = metric_value(metrics, band.metric)
    fix, passed = band.fix.format(round=round_), False
    if value is None and band.optional:
        fix, passed = "", True
    elif value is None or not math.isfinite(value) or not math.isfinite(bound):
        fix, value = (
            f"{band.metric} is missing or not finite: look for NaN in the stage's metrics.jsonl, lower its learning rate",
            None,
        )
    else:
        passed = COMPARE[band.compare](value, bound)
    return {
        "metric": band.metric,
        "value": value,
        "band": format_threshold(band, bound),
        "bound": f"gates.{gate}.{band.bound}",
        "passed": passed,
        "why": band.why,
        "next_step": fix,
    }


def evaluate_gate(params: Params, gate: str, round_: str) -> GateResult:
    """What a gate says of a round; nothing is written.

    Raises:
        BadInput: a stage before has written no metrics, or the approval is no approval.
    """
    config = getattr(params.gates, gate)
    metrics = {
        stage: read_json(stage_dir(round_, stage) / "metrics.json", f"dvc repro {stage}@{round_}")
        for stage in GATE_STAGES[gate]
    }
    checks = [
        check(gate, band, metrics, getattr(config, band.bound), round_) for band in THRESHOLDS[gate]
    ]
    failed = [row for row in checks if not row["passed"]]
    approval = read_approval(round_, gate) if failed and config.policy is Policy.ask else None
    if approval and not approval.holds_for(values(failed)):
        print(
            f"[gate_{gate}@{round_}] the approval by {approval.by} was of other numbers", flush=True
        )
        approval = None
    opened = not failed or config.policy is Policy.warn or bool(approval and approval.approved)
    return {
        "gate": gate,
        "round": round_,
        "policy": config.policy.value,
        "passed": not failed,
        "opened": opened,
        "approval": approval.model_dump() if approval else None,
        "checks": checks,
    }


def passed_or_approved(verdict: Mapping[str, Any]) -> bool:
    """Whether the numbers or a person speak for what went through; `warn` lets pass what nobody
    vouches for.
    """
    return bool(verdict["passed"] or (verdict["approval"] or {}).get("approved"))


def run_gate(params: Params, gate: str, round_: str) -> None:
    """Check, report, and open the gate.

    Raises:
        BadInput: see `judge`.
        GateFailed: names each failed check with its numbers and next step.
    """
    passage = GATES / round_ / f"{gate}.ok"
    passage.unlink(missing_ok=True)
    verdict = evaluate_gate(params, gate, round_)
    write_json(REPORTS / round_ / f"gate_{gate}.json", verdict)
    for row in verdict["checks"]:
        print(
            f"[gate_{gate}@{round_}] {'pass' if row['passed'] else 'FAIL'}  {format_check(row)}",
            flush=True,
        )
    if not verdict["opened"]:
        steps = [
            f"{format_check(row)}. Next: {row['next_step']}"
            for row in verdict["checks"]
            if not row["passed"]
        ]
        raise GateFailed("; ".join([*steps, *filter(None, [decision_message(verdict)])]))
    if approval := verdict["approval"]:
        print(
            f"[gate_{gate}@{round_}] approved by {approval['by']}: {approval['reason']}", flush=True
        )
    write_text(passage, "passed\n")


def values(failed: list[Check]) -> dict[str, float | None]:
    return {row["metric"]: row["value"] for row in failed}


def decision_message(verdict: Mapping[str, Any]) -> str:
    """What a person has said, or can say, of a gate that is shut and asks; empty for any other."""
    gate, round_, approval = verdict["gate"], verdict["round"], verdict["approval"]
    if verdict["policy"] != Policy.ask.value or verdict["opened"]:
        return ""
    if approval:
        return f"Refused by {approval['by']}: {approval['reason']}"
    return f'To go on all the same: `rondo approve {gate} {round_} --reason "..."`, then run again'


def format_check(row: Check) -> str:
    value = (
        "not measured"
        if row["passed"] and row["value"] is None
        else "missing"
        if row["value"] is None
        else format(row["value"], ".4g")
    )
    return f"{row['metric']} {value}, wanted {row['band']}"
