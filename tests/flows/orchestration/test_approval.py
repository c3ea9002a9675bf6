"""`rondo approve`, on a gate that DVC runs."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows import cli
from flows.core.config import resolve, write_params
from flows.execution import dvc_stages
from flows.orchestration.approval import Decision, decide_at_terminal, waiting
from stages.gate.approvals import Approval
from stages.lib.core.ended_rounds import settings_path
from stages.lib.core.errors import BadInput, GateFailed
from tests.flows.reproduce import reproduce

GATE = "gate_sft@r0"


def run_to_gate(*settings: str) -> dvc_stages.Outcome:
    """Run the stages up to the SFT gate, and the gate, with these settings."""
    write_params(resolve("keep", None, settings))
    reproduce(["assets", "prepare@r0", "sft@r0"])
    return dvc_stages.run(GATE, print)


def rondo(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 0


def test_a_failed_gate_that_asks_needs_a_reason_and_then_continues(project: Path) -> None:
    with pytest.raises(GateFailed, match="rondo approve sft r0 --reason"):
        run_to_gate("gates.sft.loss_drop=0.9", "gates.sft.policy=ask")
    assert waiting(GATE)
    with pytest.raises(BadInput, match="--reason is empty"):
        decide_at_terminal("sft", "r0", True, "Ada", " ")
    for answer in ({"by": "Ada", "reason": " \n"}, {"by": " ", "reason": "fine"}):
        with pytest.raises(ValidationError, match="pattern"):  # the form in the browser
            Decision(decision="approve", **answer)
        with pytest.raises(ValidationError, match="pattern"):  # a file written by hand
            Approval(approved=True, failed={}, **answer)

    rondo("approve", "sft", "r0", "--refuse", "--by", "Ada", "--reason", "too little")
    with pytest.raises(GateFailed, match="Refused by Ada: too little"):
        dvc_stages.run(GATE, print)
    assert not waiting(GATE) and waiting(GATE, refused=True)

    rondo("approve", "sft", "r0", "--by", " ", "--reason", "the loss is not what this is about")
    assert json.loads(Path("approvals/r0/sft.json").read_text())["by"] == "t"  # git's user.name
    assert dvc_stages.run(GATE, print) == dvc_stages.Outcome.ran
    assert dvc_stages.run(GATE, print) == dvc_stages.Outcome.unchanged
    assert not waiting(GATE, refused=True)


def test_a_gate_with_nothing_to_decide_is_bad_input(project: Path) -> None:
    with pytest.raises(
        BadInput, match=r"gate_sft\.json: no such verdict; run `dvc repro gate_sft@r0`"
    ):
        decide_at_terminal("sft", "r0", True, "Ada", "yes")
    run_to_gate()
    with pytest.raises(BadInput, match="the sft gate of r0 passed"):
        decide_at_terminal("sft", "r0", True, "Ada", "yes")
    settings_path("r0").write_text("rounds: {r0: {previous: assets/start}}\n")
    with pytest.raises(BadInput, match="r0 has ended: its gates do not run again"):
        decide_at_terminal("promote", "r0", True, "Ada", "yes")
    settings_path("r0").unlink()
    with pytest.raises(GateFailed):
        run_to_gate("gates.sft.loss_drop=0.9")
    with pytest.raises(BadInput, match=r"gates\.sft\.policy is `block`"):
        decide_at_terminal("sft", "r0", True, "Ada", "yes")
