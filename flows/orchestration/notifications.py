"""Notifications about runs that need a person: the environment variable RONDO_NOTIFY_URL of
`rondo up`, or a notification block named `rondo` in Prefect's UI.

An automation of the Prefect server sends them. RONDO_NOTIFY_URL creates a block of the type Custom
Webhook; blocks for mail, Slack or Teams are created by hand in the UI.
"""

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.schemas.objects import BlockDocument
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger

from flows.orchestration.outcomes import GATE_FAILED, GATES_FAILED
from flows.orchestration.prefect_requests import prefect_client

STATES = (GATE_FAILED, GATES_FAILED, "Suspended", "Failed", "Crashed")
# An existing automation is found by this name: a new name would create a second one beside it
NAME = f"rondo: tell of {', '.join(STATES)}"
BLOCK = "rondo"
# Prefect's message after Ctrl-C, and for runs that `rondo up` interrupts: nobody is notified
ENDED_BY_US = "Execution was aborted by a* signal."
TRIGGER = EventTrigger.model_validate(
    {
        "type": "event",
        "posture": "Reactive",
        "expect": [f"prefect.flow-run.{state}" for state in STATES],
        "match": {
            "prefect.resource.id": "prefect.flow-run.*",
            "prefect.state-message": f"!{ENDED_BY_US}",
        },
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "within": 0,
    }
)
# Jinja, rendered by Prefect. A suspended run has no message of its own. The message of a failed
# stage ends with lines that the stage printed, such as rows of the data: only the part before them,
# `BadInput: sft@r0`, leaves this machine.
REASON = (
    "{% if flow_run.state.name == 'Suspended' %}"
    "waits for a decision: press Resume on its page"
    f"{{% elif flow_run.state.name in ('{GATE_FAILED}', '{GATES_FAILED}') %}}"
    "{{ flow_run.state.message }}"
    "{% else %}"
    "{{ flow_run.state.message.replace('Flow run encountered an exception: ', '')"
    ".split('\n')[0].split(':')[:2]|join(':') }}"
    "{% endif %}"
)
SUBJECT = "{{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}"
BODY = f"{REASON}\n{{{{ flow_run|ui_url }}}}"


def set_up_notifications(url: str | None) -> list[str]:
    """Create or replace the automation that notifies every block named `rondo`.

    It stays off if a person has switched it off.

    Args:
        url: The address of a webhook; its block is created first. None: the existing blocks only.

    Returns:
        The types of the blocks.
    """
    if url:
        # The address of a webhook is a secret: who knows it can write to the channel
        CustomWebhookNotificationBlock(
            name=BLOCK,
            url="{{url}}",
            secrets={"url": url},
            # `text` is the key that Slack and Mattermost read
            json_data={"text": "{{subject}}\n{{body}}"},
        ).save(BLOCK, overwrite=True)
    with prefect_client() as client:
        blocks = [block for block in client.read_block_documents() if _notifies(block)]
        actions = [
            SendNotification(block_document_id=block.id, subject=SUBJECT, body=BODY)
            for block in blocks
        ]
        automation = AutomationCore(name=NAME, trigger=TRIGGER, actions=actions)
        existing = client.read_automations_by_name(NAME) if actions else []
        for old in existing:
            client.update_automation(old.id, automation.model_copy(update={"enabled": old.enabled}))
        if actions and not existing:
            client.create_automation(automation)
    return [block.block_type_name or "" for block in blocks]


def _notifies(block: BlockDocument) -> bool:
    schema = block.block_schema
    return block.name == BLOCK and schema is not None and "notify" in schema.capabilities
