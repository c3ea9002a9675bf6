"""What `rondo up` asks Prefect's server, and tells it, over HTTP: this process needs none of
Prefect's own client.
"""

import json
import os
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

HOST = "127.0.0.1"
PREFECT_PORT = int(os.environ.get("PREFECT_SERVER_API_PORT", "4200"))
PREFECT_URL = f"http://{HOST}:{PREFECT_PORT}"


def ask(path: str, body: Any = None, method: str | None = None) -> Any:
    """What Prefect answers to a POST, or, without a body, to a GET; asked again while its database
    is busy.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{PREFECT_URL}/api/{path}", data, {"Content-Type": "application/json"}, method=method
    )
    for seconds in (0.5, 1, 2, None):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or seconds is None:
                raise
            time.sleep(seconds)
    raise AssertionError("not reached")


def flow_runs(**filters: Any) -> list[str]:
    """Ids of the flow runs that Prefect's filters let through."""
    return [run["id"] for run in ask("flow_runs/filter", {"flow_runs": filters})]


def set_state(run: str, state: dict[str, str], force: bool = False) -> None:
    """Not forced, it leaves alone what has come to its end meanwhile."""
    ask(f"flow_runs/{run}/set_state", {"state": state, "force": force})
