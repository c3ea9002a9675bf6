"""What a notification says, rendered by Prefect's own templates."""

from types import SimpleNamespace

import pytest
from prefect.server.utilities.user_templates import render_user_template_sync

from flows.orchestration.notifications import REASON

EXCEPTION = "Flow run encountered an exception"
SECRET = "row 7: the text of a person"


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [
        (
            "Failed",
            f"{EXCEPTION}: BadInput: sft@r0: {SECRET}\nnext line",
            "BadInput: sft@r0",
        ),
        ("Failed", f"BadInput: sft@r0: {SECRET}\nnext line", "BadInput: sft@r0"),
        (
            "Failed",
            f"{EXCEPTION}: RondoError: sft@r0 ended with exit code 1:\n{SECRET}",
            "RondoError: sft@r0 ended with exit code 1",
        ),
        ("Crashed", "its process ended without reporting a result", ""),
        ("GateFailed", "gate sft of r0 failed:\nsft.loss_before 0.5, wanted >= 0.9", ""),
        ("GatesFailed", "SFT is at fault: raise sft.num_train_epochs", ""),
        ("Suspended", None, "waits for a decision: press Resume on its page"),
    ],
)
def test_a_notification_has_no_line_that_a_stage_printed(
    name: str, message: str | None, reason: str
) -> None:
    run = SimpleNamespace(state=SimpleNamespace(name=name, message=message))
    text = render_user_template_sync(REASON, {"flow_run": run})
    assert text == (reason or message)
