"""What a stranger tries on a running `rondo up`, and where a secret could be found (SECURITY.md).

test_up.py calls these with its server, since a start takes half a minute.
"""

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from flows.core.services import SERVERS, last_servers, running_prefect
from flows.tracking.mlflow_store import store_uri
from tests.servers import request

API_KEY = "sk-planted-api-key"
HOOK = "planted-hook"
PASSWORD = "planted-password"
EVIL = "http://evil.example"
PROTOCOL = Subprotocol("prefect")


def status(url: str, method: str, **headers: str) -> tuple[int, str | None]:
    """The status of the answer, and the origin whose pages may read it."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if method == "OPTIONS" else b'{"max_results": 1}'
    sent = urllib.request.Request(
        url, data, {"Content-Type": "application/json", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return answer.status, answer.headers["Access-Control-Allow-Origin"]
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Access-Control-Allow-Origin"]


def without_the_string(project: Path) -> None:
    """A program of another user on this machine."""
    api = f"{last_servers(project / '.rondo').prefect}/api"
    for auth in ("", "rondo:@", "admin:pass@", "rondo:guessed@"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            request(f"{api}/flow_runs/filter".replace("//", f"//{auth}"), {})
    address = api.replace("http", "ws")
    for path in ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled"):
        with connect(f"{address}/{path}", subprotocols=[PROTOCOL]) as socket:
            socket.send(json.dumps({"type": "auth", "token": "guessed"}))
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=60)


def from_pages_of_other_hosts(project: Path) -> None:
    """A page that the user opens in the browser while `rondo up` runs."""
    servers = last_servers(project / ".rondo")
    preflight = {"Access_Control_Request_Method": "POST"}
    run = f"{servers.prefect}/api/flow_runs/filter"
    assert status(run, "OPTIONS", Origin=EVIL, **preflight) == (400, None)
    assert status(run, "OPTIONS", Origin=servers.prefect, **preflight) == (200, servers.prefect)
    assert status(run, "POST", Origin=EVIL) == (401, None)
    search = f"{servers.mlflow}/api/2.0/mlflow/experiments/search"
    assert status(search, "POST", Origin=EVIL) == (403, None)
    assert status(search, "POST", Host="evil.example") == (403, None)  # DNS rebinding
    assert status(search, "POST")[0] == 200


def from_another_project(project: Path, other: Path) -> None:
    """Which finds servers on the usual ports, and even has a copy of the file with the string."""
    other.mkdir(parents=True)
    (other / SERVERS).write_text((project / ".rondo" / SERVERS).read_text())
    assert running_prefect(project / ".rondo") and store_uri(project / ".rondo").startswith("http")
    assert running_prefect(other) is None
    assert store_uri(other) == f"sqlite:///{other / 'mlflow.db'}"


def secrets_in_files(project: Path) -> list[str]:
    """Where planted secrets are: in params, logs, databases, reports, or any commit of a branch."""
    auth = last_servers(project / ".rondo").auth.split(":")[1]
    secrets = [secret.encode() for secret in (API_KEY, HOOK, PASSWORD, auth)]
    files = [path for path in project.rglob("*") if path.is_file() and not path.is_symlink()]
    content = {str(path): path.read_bytes() for path in files if path.name != SERVERS}
    every_object = ["git", "cat-file", "--batch", "--batch-all-objects"]
    done = subprocess.run(every_object, cwd=project, capture_output=True, check=True)
    content["git"] = done.stdout
    assert b"params.yaml" in content["git"] and len(content) > len({"git"})
    return [
        f"{secret!r} in {name}"
        for name, text in content.items()
        for secret in secrets
        if secret in text
    ]
