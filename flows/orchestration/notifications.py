"""Who is told of a run that needs a person: `rondo up --notify URL`, or a notification block named
`rondo` in Prefect's UI.

Prefect's server tells them, by an automation. `--notify` makes a block of the type Custom Webhook;
those of mail, Slack or Teams a person makes.
"""

from typing import Any
from urllib.parse import urlsplit

from flows.core.prefect_api import ask
from stages.lib.core.errors import BadInput

STATES = ("GateFailed", "Suspended", "Failed", "Crashed")
NAME = f"rondo: tell of {', '.join(STATES)}"
BLOCK = "rondo"
# Prefect's words after Ctrl-C, and where `rondo up` cuts off what goes on later
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
WHY = "'waits for a decision: Resume, on its page' if flow_run.state.name == 'Suspended' else flow_run.state.message"
MESSAGE = {
    "subject": "{{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}",
    "body": f"{{{{ {WHY} }}}}\n{{{{ flow_run|ui_url }}}}",
}


def check(url: str) -> None:
    """Refuse what takes no POST.

    Raises:
        BadInput: it is no address of http or https.
    """
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise BadInput(
            f"--notify {url}: expected an address that takes a POST, http://... or https://..."
        )


def tell(url: str | None) -> list[str]:
    """Have the automation tell every block named `rondo`, the webhook at `url` among them; returns
    their types.

    One that is there keeps its words, and whether it is on, as a person left them.
    """
    if url:
        _webhook(url)
    blocks = ask(
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
    known = ask("automations/filter", {"automations": {"name": {"any_": [NAME]}}})
    if actions and not known:
        ask("automations/", {"name": NAME, "trigger": TRIGGER, "actions": actions})
    elif known:
        told = {action.get("block_document_id") for action in known[0]["actions"]}
        new = [action for action in actions if action["block_document_id"] not in told]
        if new:
            _change(known[0], [*known[0]["actions"], *new])
    return [block["block_type_name"] for block in blocks]


def _change(automation: dict[str, Any], actions: list[dict[str, Any]]) -> None:
    kept = {key: automation[key] for key in ("name", "description", "enabled", "tags", "trigger")}
    ask(f"automations/{automation['id']}", {**kept, "actions": actions}, "PUT")


def _webhook(url: str) -> None:
    """The block of `--notify`, made or changed. `text` is the key that Slack and Mattermost read."""
    kind = ask("block_types/slug/custom-webhook")["id"]
    of_kind = {"block_documents": {"name": {"any_": [BLOCK]}, "block_type_id": {"any_": [kind]}}}
    if known := ask("block_documents/filter", of_kind):
        ask(f"block_documents/{known[0]['id']}", {"data": {"url": url}}, "PATCH")
        return
    schema = ask("block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}})[0][
        "id"
    ]
    data = {"name": BLOCK, "url": url, "json_data": {"text": "{{subject}}\n{{body}}"}}
    ask(
        "block_documents/",
        {"name": BLOCK, "block_type_id": kind, "block_schema_id": schema, "data": data},
    )
