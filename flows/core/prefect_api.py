"""Requests to Prefect's server over plain HTTP.

`rondo up` uses them, so that its process does not have to import Prefect.
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
RETRY_SECONDS = (0.5, 1, 2)


def request(path: str, body: Any = None, method: str | None = None) -> Any:
    """Send a request to Prefect's API and return the parsed JSON response.

    A request with a body is a POST, one without a body is a GET, unless `method` names another
    method. If the server's database is busy (503), the request is repeated up to three times.

    Args:
        path: below `/api/`, e.g. `flow_runs/filter`.
        body: is sent as JSON.

    Raises:
        urllib.error.HTTPError: the server returned an error.
        OSError: the server does not respond.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{PREFECT_URL}/api/{path}", data, {"Content-Type": "application/json"}, method=method
    )
    for delay in (*RETRY_SECONDS, None):
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return json.loads(response.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or delay is None:
                raise
            time.sleep(delay)
    raise AssertionError("not reached")


def flow_runs(**filters: Any) -> list[str]:
    """Ids of the flow runs that match Prefect's filters."""
    return [run["id"] for run in request("flow_runs/filter", {"flow_runs": filters})]


def set_state(run: str, state: dict[str, str], force: bool = False) -> None:
    """Set the state of a flow run; without `force`, a run that has ended keeps its state."""
    request(f"flow_runs/{run}/set_state", {"state": state, "force": force})
