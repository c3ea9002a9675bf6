"""Notifications about runs that need a person: `rondo up --notify URL`, or a notification block
named `rondo` in Prefect's UI.

An automation of the Prefect server sends them. `--notify` creates a block of the type Custom
Webhook; blocks for mail, Slack or Teams are created by hand in the UI.
"""

from typing import Any
from urllib.parse import urlsplit

from flows.core.prefect_api import request
from stages.lib.core.errors import BadInput

STATES = ("GateFailed", "Suspended", "Failed", "Crashed")
# An existing automation is found by this name: a new name would create a second one beside it
NAME = f"rondo: tell of {', '.join(STATES)}"
BLOCK = "rondo"
# Prefect's message after Ctrl-C, and for runs that `rondo up` interrupts: nobody is notified
ENDED_BY_US = "Execution was aborted by a* signal."
TRIGGER = {
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
# Jinja, rendered by Prefect: a suspended run has no message of its own
REASON = (
    "'waits for a decision: press Resume on its page' "
    "if flow_run.state.name == 'Suspended' else flow_run.state.message"
)
MESSAGE = {
    "subject": "{{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}",
    "body": f"{{{{ {REASON} }}}}\n{{{{ flow_run|ui_url }}}}",
}


def check_webhook(url: str) -> None:
    """
    Raises:
        BadInput: it is not an address of http or https.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise BadInput(
            f"--notify {url}: expected an address that accepts a POST, http://... or https://..."
        )


def set_up_notifications(url: str | None) -> list[str]:
    """Create or extend the automation that notifies every block named `rondo`.

    An existing automation keeps its actions and whether it is enabled, as a person left it.

    Args:
        url: The address of a webhook; its block is created first. None: the existing blocks only.

    Returns:
        The types of the blocks.
    """
    if url:
        _save_webhook_block(url)
    blocks = request(
        "block_documents/filter",
        {
            "block_documents": {"name": {"any_": [BLOCK]}},
            "block_schemas": {"block_capabilities": {"all_": ["notify"]}},
        },
    )
    actions = [
        {"type": "send-notification", "block_document_id": block["id"], **MESSAGE}
        for block in blocks
    ]
    existing = request("automations/filter", {"automations": {"name": {"any_": [NAME]}}})
    if actions and not existing:
        request("automations/", {"name": NAME, "trigger": TRIGGER, "actions": actions})
    elif existing:
        automation = existing[0]
        notified = {action.get("block_document_id") for action in automation["actions"]}
        new = [action for action in actions if action["block_document_id"] not in notified]
        if new:
            _set_actions(automation, [*automation["actions"], *new])
    return [block["block_type_name"] for block in blocks]


def _set_actions(automation: dict[str, Any], actions: list[dict[str, Any]]) -> None:
    # A PUT replaces all fields, so the others are sent back as they are
    fields = {key: automation[key] for key in ("name", "description", "enabled", "tags", "trigger")}
    request(f"automations/{automation['id']}", {**fields, "actions": actions}, "PUT")


def _save_webhook_block(url: str) -> None:
    """Create the block of `--notify`, or set the address of the existing one."""
    type_id = request("block_types/slug/custom-webhook")["id"]
    of_type = {"block_type_id": {"any_": [type_id]}}
    existing = request(
        "block_documents/filter", {"block_documents": {"name": {"any_": [BLOCK]}, **of_type}}
    )
    if existing:
        request(f"block_documents/{existing[0]['id']}", {"data": {"url": url}}, "PATCH")
        return
    schema = request("block_schemas/filter", {"block_schemas": of_type})[0]
    # `text` is the key that Slack and Mattermost read
    data = {"name": BLOCK, "url": url, "json_data": {"text": "{{subject}}\n{{body}}"}}
    block = {"name": BLOCK, "block_type_id": type_id, "block_schema_id": schema["id"]}
    request("block_documents/", {**block, "data": data})
