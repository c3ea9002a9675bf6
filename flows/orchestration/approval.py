"""A gate that asks (gates.<gate>.policy `ask`): a person decides, in the Prefect UI or with `rondo
approve`, and says why.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput, keyset_from_base_key
from prefect.input.actions import delete_flow_run_input, read_flow_run_input
from prefect.runtime import deployment
from pydantic import Field

from flows.core.addresses import slug, split_address
from flows.core.git import current_user
from flows.core.verdicts import failed_checks, read_gate
from stages.gate.approvals import Approval, write_approval
from stages.gate.verdict import values
from stages.lib.core.errors import BadInput
from stages.lib.core.params.gates import Policy

WAIT_SECONDS = 7 * 24 * 3600


class Decision(RunInput):
    """The form that a suspended run shows."""

    approve: bool = Field(False, description="Go on although these numbers are out of their bands.")
    by: str = Field(min_length=1, description="Who decides.")
    reason: str = Field(
        min_length=1, description="Why; it is kept in the verdict, in approvals/ and in MLflow."
    )


def waiting(address: str) -> dict[str, Any] | None:
    """The verdict of a gate that is shut and waits for a decision; None for any other stage, and
    for one that was refused.
    """
    stage, round_ = split_address(address)
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    asks = (
        verdict
        and not verdict["opened"]
        and verdict["policy"] == Policy.ask.value
        and not verdict["approval"]
    )
    return verdict if asks else None


def decided_in_the_ui(address: str) -> bool:
    """Whether somebody has decided on the gate of a run that was started in the Prefect UI; until
    then it is suspended: its process ends, and starts again with the decision.

    Raises:
        Pause: there is no decision yet.
    """
    verdict = waiting(address)
    if verdict is None or not deployment.id:  # a run of the terminal has nobody who looks at the UI
        return False
    get_run_logger().info(f"{address} waits for a decision: press Resume in this run's page")
    told = "\n".join(
        [
            f"The {verdict['gate']} gate of {verdict['round']} is shut:",
            *(f"- {line}" for line in failed_checks(verdict)),
        ]
    )
    form, key = Decision.with_initial_data(description=told), key_of(verdict)
    answers = keyset_from_base_key(f"suspended-{key}")
    if given := read_flow_run_input(answers["response"]):  # before the run was cut off
        decision = Decision.model_validate(given)
    else:
        for (
            name
        ) in answers.values():  # of a question that nobody has answered: Prefect takes none twice
            if read_flow_run_input(name) is not None:
                delete_flow_run_input(name)
        decision = suspend_flow_run(wait_for_input=form, timeout=WAIT_SECONDS, key=key)
    decide(verdict, decision.approve, decision.by, decision.reason)
    return True


def key_of(verdict: dict[str, Any]) -> str:
    """Of a question: the folder, the gate, and the numbers that are seen, for a decision holds for
    these alone.
    """
    numbers = json.dumps(failed_values(verdict), sort_keys=True)
    return slug(
        f"{Path.cwd().name}-{verdict['gate']}-{verdict['round']}-{hashlib.sha256(numbers.encode()).hexdigest()[:8]}".lower()
    )


def decide(verdict: dict[str, Any], approve: bool, by: str, reason: str) -> str:
    """Write the decision down; returns the path."""
    approval = Approval(approved=approve, by=by, reason=reason, failed=failed_values(verdict))
    return str(write_approval(verdict["round"], verdict["gate"], approval))


def failed_values(verdict: dict[str, Any]) -> dict[str, float | None]:
    return values([check for check in verdict["checks"] if not check["passed"]])


def decide_here(gate: str, round_: str, approve: bool, by: str | None, reason: str) -> str:
    """`rondo approve`.

    Raises:
        BadInput: the gate was not reached, or has nothing to be decided.
    """
    verdict = read_gate(round_, gate)
    if verdict is None:
        raise BadInput(
            f"reports/{round_}/gate_{gate}.json: no such verdict; run `dvc repro gate_{gate}@{round_}` first"
        )
    if verdict["passed"]:
        raise BadInput(f"the {gate} gate of {round_} has passed: there is nothing to approve")
    if verdict["policy"] != Policy.ask.value:
        raise BadInput(
            f"gates.{gate}.policy is `{verdict['policy']}`: set it to `ask` in params.yaml, run again, then decide"
        )
    if not reason.strip():
        raise BadInput(
            '--reason is empty: say why, e.g. --reason "the slice has 31 pairs, seen by hand"'
        )
    return decide(verdict, approve, by or current_user(), reason)
