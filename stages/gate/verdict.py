"""The verdict of a quality gate: `python -m stages.gate --gate sft|reward|promote --round r0`.

A gate passes if each number is within its threshold (stages/lib/thresholds). If not, the run
continues only if gates.<gate>.policy is `warn`, or if it is `ask` and a person has approved these
very numbers. In these cases gates/<round>/<gate>.ok is written; without it `dvc repro` and the flow
stop. Nothing depends on `promote`: the next round learns from the failures of this one. The verdict
is written to reports/<round>/gate_<gate>.json in any case, with the decision `may_continue`; and
with `not_judged`, the reason, if its stages measured nothing. No model is loaded here.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from stages.gate.approvals import read_approval
from stages.gate.thresholds import GATE_STAGES, format_threshold
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import GATES, REPORTS, write_json, write_text
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import START
from stages.lib.core.params.gates import Policy
from stages.lib.core.params.policy import OFFLINE
from stages.lib.core.params.shared import InitFrom
from stages.lib.core.recorder import NOT_MEASURED, read_metrics
from stages.lib.thresholds import THRESHOLDS
from stages.lib.thresholds.form import Change, Threshold

COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "within": lambda value, bound: abs(value) <= bound,
}
Check = dict[str, Any]  # one threshold's line of the verdict
GateResult = dict[str, Any]


def look_up(metrics: Any, name: str) -> Any:
    """The value at a dotted name; NaN if it is missing."""
    for key in name.split("."):
        metrics = metrics.get(key, math.nan) if isinstance(metrics, Mapping) else math.nan
    return metrics


def metric_value(metrics: Any, metric: str) -> float | None:
    """A metric, or the difference of two.

    NaN, which passes no threshold, if one is missing or not a number; None if its stage wrote null,
    or measured nothing.
    """
    values = [look_up(metrics, name) for name in metric.split(" - ")]
    if None in values or why_not_measured(metrics, metric):
        return None
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return math.nan
    return float(values[0] - sum(values[1:]))


def why_not_measured(metrics: Any, metric: str) -> str:
    """Why the stage of a metric measured nothing; empty if it did measure."""
    stages = (name.partition(".")[0] for name in metric.split(" - "))
    reasons = (metrics.get(stage, {}).get(NOT_MEASURED, "") for stage in stages)
    return next(filter(None, reasons), "")


def check_threshold(
    gate: str, threshold: Threshold, metrics: Any, params: Params, round_: str
) -> Check:
    """One line of the verdict; a NaN or infinite value or bound fails. What was not measured passes
    if it may be missing, or its stage measured nothing.

    A check that failed has the fault, the next step, and in `setting` the value to try first; one
    that passed and has a fault is a warning.
    """
    value, bound = metric_value(metrics, threshold.metric), bound_of(gate, threshold, params)
    fault, change = threshold.fault, threshold.change
    next_step, right = threshold.fix.format(round=round_), False
    not_measured = threshold.optional or why_not_measured(metrics, threshold.metric)
    warns = bool(threshold.warns_with and look_up(params.model_dump(), threshold.warns_with))
    if value is None and not_measured:
        right = True
    elif value is None or not math.isfinite(value) or not math.isfinite(bound):
        value, change, warns = None, None, False
        fault = f"{threshold.metric} is missing or not finite"
        next_step = "Look for NaN in the stage's metrics.jsonl, lower its learning rate"
    else:
        right = COMPARE[threshold.compare](value, bound)
        if value < 0 and threshold.below_zero:
            fault, change = threshold.below_zero
    return {
        "metric": threshold.metric,
        "name": threshold.name,
        "value": value,
        "threshold": format_threshold(threshold, bound),
        "bound": f"gates.{gate}.{threshold.bound}",
        "limit": bound,
        "passed": right or warns,
        "why": threshold.why,
        "fault": "" if right else fault,
        "next_step": "" if right else next_step,
        "setting": "" if right or change is None else setting(change, params, round_),
    }


def bound_of(gate: str, threshold: Threshold, params: Params) -> float:
    """The bound of a threshold in params.yaml."""
    return float(getattr(getattr(params.gates, gate), threshold.bound))


def setting(change: Change, params: Params, round_: str) -> str:
    """A change of params.yaml as `--set` takes it, e.g. `sft.num_train_epochs=6`.

    Epochs are those that decide: `max_steps` if it is set, `continue_epochs` in later rounds. Empty
    if the setting does nothing in this round, or already has such a value.
    """
    key, factor = change
    section, _, name = key.partition(".")
    values = params.model_dump(mode="json")
    if name == "num_train_epochs":
        first = round_ not in params.rounds or params.rounds[round_].previous == START
        continues = not first and values[section]["init_from"] == InitFrom.previous.value
        order = ("max_steps", *(["continue_epochs"] if continues else []), name)
        name = next(key for key in order if values[section][key])
    old = values[section][name]
    if not old or (section == "ppo" and params.algorithm in OFFLINE):
        return ""
    new = old * factor
    if isinstance(old, int):
        new = math.ceil(new) if factor > 1 else max(1, math.floor(new))
    try:
        check_params(values | {section: values[section] | {name: new}}, "setting")
    except BadInput:
        return ""
    return "" if new == old else f"{section}.{name}={new:g}"


def evaluate_gate(params: Params, gate: str, round_: str) -> GateResult:
    """The verdict of a gate on a round; nothing is written.

    Raises:
        BadInput: the metrics of a stage are missing, or the approval is not valid.
    """
    metrics = {stage: read_metrics(round_, stage) for stage in GATE_STAGES[gate]}
    checks = [
        check_threshold(gate, threshold, metrics, params, round_) for threshold in THRESHOLDS[gate]
    ]
    failed = [check for check in checks if not check["passed"]]
    policy: Policy = getattr(params.gates, gate).policy
    approval = read_approval(round_, gate) if failed and policy is Policy.ask else None
    if approval and not approval.holds_for(values_by_metric(failed)):
        message = f"the approval by {approval.by} is ignored: it was given for other numbers"
        print(f"[gate_{gate}@{round_}] {message}", flush=True)
        approval = None
    may_continue = not failed or policy is Policy.warn or bool(approval and approval.approved)
    return {
        "gate": gate,
        "round": round_,
        "policy": policy.value,
        "passed": not failed,
        "may_continue": may_continue,
        "approval": approval.model_dump() if approval else None,
        "checks": checks,
        **not_judged(metrics),
    }


def not_judged(metrics: Mapping[str, Any]) -> dict[str, str]:
    """{not_judged: the reason} if no stage of a gate measured anything, else {}."""
    reasons = [values.get(NOT_MEASURED) for values in metrics.values()]
    return {"not_judged": str(reasons[0])} if all(reasons) else {}


def passed_or_approved(verdict: Mapping[str, Any]) -> bool:
    """Whether the gate passed, or a person approved its numbers; `policy: warn` is neither."""
    return bool(verdict["passed"] or (verdict["approval"] or {}).get("approved"))


def run_gate(params: Params, gate: str, round_: str) -> None:
    """Evaluate a gate and write its verdict, and its .ok file if the run may continue.

    Raises:
        BadInput: see `evaluate_gate`.
        GateFailed: names each failed check with its numbers and next step.
    """
    ok_file = GATES / round_ / f"{gate}.ok"
    ok_file.unlink(missing_ok=True)
    verdict = evaluate_gate(params, gate, round_)
    write_json(REPORTS / round_ / f"gate_{gate}.json", verdict)
    for check in verdict["checks"]:
        outcome = "FAIL" if not check["passed"] else "warn" if check["fault"] else "pass"
        advice = f": {check['fault']}. {check['next_step']}" if outcome == "warn" else ""
        print(f"[gate_{gate}@{round_}] {outcome}  {format_check(check)}{advice}", flush=True)
    if reason := verdict.get("not_judged"):
        print(f"[gate_{gate}@{round_}] not judged: {reason}", flush=True)
    if not verdict["may_continue"]:
        failures = [*failed_checks(verdict), *filter(None, [decision_message(verdict)])]
        raise GateFailed("; ".join(failures))
    if approval := verdict["approval"]:
        by, reason = approval["by"], approval["reason"]
        print(f"[gate_{gate}@{round_}] approved by {by}: {reason}", flush=True)
    write_text(ok_file, "passed\n")


def failed_checks(verdict: Mapping[str, Any]) -> list[str]:
    """One line per failed check: metric, value, threshold, fault, next step."""
    return [
        f"{format_check(check)}: {check['fault']}. {check['next_step']}"
        for check in verdict["checks"]
        if not check["passed"]
    ]


def values_by_metric(failed: list[Check]) -> dict[str, float | None]:
    return {check["metric"]: check["value"] for check in failed}


def decision_message(verdict: Mapping[str, Any]) -> str:
    """The decision of a person on a failed gate with `policy: ask`, or how to decide.

    Empty for any other gate.
    """
    gate, round_, approval = verdict["gate"], verdict["round"], verdict["approval"]
    if verdict["policy"] != Policy.ask.value or verdict["may_continue"]:
        return ""
    revise = f'`rondo approve {gate} {round_} --reason "..."`, then run again'
    if approval:
        return f"Refused by {approval['by']}: {approval['reason']}. To revise it: {revise}"
    return f"To continue anyway: {revise}"


def format_check(row: Check) -> str:
    """`reward.ece 0.04, wanted <= 0.1`; no value: `missing`, or `not measured` if allowed."""
    no_value = "not measured" if row["passed"] else "missing"
    value = no_value if row["value"] is None else format(row["value"], ".4g")
    return f"{row['metric']} {value}, wanted {row['threshold']}"
