"""Approval of a failed gate whose policy is `ask` (gates.<gate>.policy).

A person approves or refuses, in the Prefect UI or with `rondo approve`, and gives a reason.
"""

from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger
from prefect.flow_runs import suspend_flow_run
from prefect.input import Keyset, RunInput, keyset_from_base_key
from prefect.input.actions import delete_flow_run_input, read_flow_run_input
from prefect.runtime import deployment
from pydantic import Field

from flows.core.addresses import slug, split_address
from flows.core.git import person
from flows.core.verdicts import failed_values, read_gate
from flows.orchestration import cards
from stages.gate.approvals import Approval, check_reason, write_approval
from stages.gate.thresholds import GATE_STAGES
from stages.gate.verdict import failed_checks
from stages.lib.core.ended_rounds import has_ended
from stages.lib.core.errors import BadInput
from stages.lib.core.files import json_hash
from stages.lib.core.params.gates import Policy

WAIT_SECONDS = 7 * 24 * 3600


class Decision(RunInput):
    """The form that a suspended run shows."""

    # Without a default: who only presses the button has decided nothing
    decision: Literal["approve", "refuse"] = Field(
        description="`approve`: the run continues although the gate failed. `refuse`: the gate "
        "stays failed, which ends the run unless another round follows; *Retry* asks again."
    )
    by: str = Field(pattern=r"\S", description="Your name; nobody checks it.")
    reason: str = Field(
        pattern=r"\S",
        description="Your reason. It is recorded in the verdict, in approvals/ and in MLflow.",
    )


def waiting(address: str, refused: bool = False) -> dict[str, Any] | None:
    """The verdict of a failed gate that waits for a decision; None for any other stage.

    Args:
        refused: whether a refused gate waits, too.
    """
    stage, round_ = split_address(address)
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    undecided = (
        verdict
        and not verdict["may_continue"]
        and verdict["policy"] == Policy.ask.value
        and (refused or not verdict["approval"])
    )
    return verdict if undecided else None


def apply_ui_decision(address: str, revise: bool) -> bool:
    """Whether a person decided on this gate, in a run that was started from the Prefect UI.

    Without a decision the run is suspended: its process ends, and Prefect starts the flow again
    with the decision.

    Args:
        revise: whether a recorded refusal is no decision: *Retry* of the run that it ended.

    Returns:
        False if there is nothing to decide, or if the run was started from a terminal.

    Raises:
        Pause: there is no decision yet.
    """
    verdict = waiting(address, revise)
    if verdict is None or not deployment.id:  # without a deployment it is a run of the terminal
        return False
    get_run_logger().info(f"{address} waits for a decision: press Resume on this run's page")
    key = key_of(verdict)
    input_keys = keyset_from_base_key(f"suspended-{key}")
    if response := read_flow_run_input(input_keys["response"]):  # given before an interruption
        decision = Decision.model_validate(response)
    else:
        _delete(input_keys)  # Prefect accepts no second question with the same key
        form = Decision.with_initial_data(description=question(verdict))
        decision = suspend_flow_run(wait_for_input=form, timeout=WAIT_SECONDS, key=key)
    decide(verdict, decision.decision == "approve", decision.by, decision.reason)
    _delete(input_keys)  # else it would answer the question that follows a refusal
    return True


def question(verdict: dict[str, Any]) -> str:
    """The text above the form, in Markdown: what failed, an earlier refusal, links to results."""
    gate, round_, refusal = verdict["gate"], verdict["round"], verdict["approval"]
    lines = [f"The {gate} gate of {round_} failed:"]
    lines += [f"- {check}" for check in failed_checks(verdict)]
    if refusal:
        lines += ["", f"It was refused by {refusal['by']}: {refusal['reason']}"]
    lines += ["", *_results(gate, round_)]
    return "\n".join(lines)


def _results(gate: str, round_: str) -> list[str]:
    """Links to what this run's page has on a gate: its verdict, and the results of its stages."""
    addresses = [f"{stage}@{round_}" for stage in (f"gate_{gate}", *GATE_STAGES[gate])]
    return cards.links(list(map(slug, addresses)))


def _delete(input_keys: Keyset) -> None:
    for input_key in input_keys.values():
        if read_flow_run_input(input_key) is not None:
            delete_flow_run_input(input_key)


def key_of(verdict: dict[str, Any]) -> str:
    """The key of a question in Prefect.

    It contains a hash of the failed numbers, because a decision is valid for these numbers only.
    """
    digest = json_hash(failed_values(verdict))[:8]
    return slug(f"{Path.cwd().name}-{verdict['gate']}-{verdict['round']}-{digest}".lower())


def decide(verdict: dict[str, Any], approve: bool, by: str, reason: str) -> str:
    """Write the decision to approvals/ and return its path."""
    approval = Approval(approved=approve, by=by, reason=reason, failed=failed_values(verdict))
    return str(write_approval(verdict["round"], verdict["gate"], approval))


def decide_at_terminal(gate: str, round_: str, approve: bool, by: str | None, reason: str) -> str:
    """`rondo approve`: write the decision of a person at the terminal and return its path.

    Raises:
        BadInput: the gate was not reached, passed, or does not ask, the round has ended, or the
            reason is empty.
    """
    check_reason(reason, "the slice has 31 pairs, seen by hand")
    if has_ended(round_):
        raise BadInput(
            f"{round_} has ended: its gates do not run again; `rondo promote` shows the versions, "
            "`rondo promote VERSION --reason R` makes one champion"
        )
    verdict = read_gate(round_, gate)
    if verdict is None:
        raise BadInput(
            f"reports/{round_}/gate_{gate}.json: no such verdict; "
            f"run `dvc repro gate_{gate}@{round_}` first"
        )
    if verdict["passed"]:
        raise BadInput(f"the {gate} gate of {round_} passed: there is nothing to approve")
    if verdict["policy"] != Policy.ask.value:
        raise BadInput(
            f"gates.{gate}.policy is `{verdict['policy']}`: set it to `ask` in params.yaml, "
            "run again, then decide"
        )
    return decide(verdict, approve, person(by), reason)
