"""What the network failed is tried again, by `rondo run` against a real Prefect server, and nothing
else is.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.orchestration import retries
from flows.orchestration.server import prefect_environment
from stages.lib.core.errors import BadInput
from tests.paths import ROOT
from tests.servers import free_port, request, until


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests here, since its start is what takes the time."""
    port = free_port()
    environment = os.environ | prefect_environment(tmp_path_factory.mktemp("prefect"))
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    with open(os.devnull, "w") as nowhere:
        server = subprocess.Popen(command, env=environment, stdout=nowhere, stderr=nowhere)
    try:
        until(lambda: listens(f"http://127.0.0.1:{port}/api/health"), 300)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        server.terminate()
        server.wait(60)


def listens(url: str) -> bool:
    try:
        return bool(request(url))
    except OSError:
        return False


def rondo_run(
    project: Path, api: str, setting: str, waits: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        "RONDO_NETWORK_WAITS": waits,
        "MLFLOW_TRACKING_URI": "off",
        "PREFECT_API_URL": api,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "flows.cli", "run", "--set", setting]
    return subprocess.run(
        command,
        cwd=project,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def tries(done: subprocess.CompletedProcess[str]) -> int:
    return done.stdout.count("[sft@r0] step 1/3")


def states(api: str, address: str) -> set[str]:
    """The names of those that a stage was in."""
    runs = [run["id"] for run in request(f"{api}/task_runs/filter", {}) if run["name"] == address]
    return {
        state["name"]
        for run in runs
        for state in request(f"{api}/task_run_states/?task_run_id={run}")
    }


def test_what_the_network_failed_passes_at_the_second_try(project: Path, api: str) -> None:
    done = rondo_run(project, api, "sft.max_steps=7", "1")
    assert done.returncode == 0, done.stderr
    assert (
        tries(done) == 2
        and "[sft@r0] out of reach at try 1 of 2: tried again in 1 s" in done.stdout
    )
    assert "[evaluate@r0] ran" in done.stdout
    until(
        lambda: {"AwaitingRetry", "Completed"} <= states(api, "sft@r0")
    )  # the server may be behind


def test_a_server_that_stays_away_ends_the_run_with_4(project: Path, api: str) -> None:
    done = rondo_run(project, api, "sft.max_steps=8", "0,1")
    assert done.returncode == 4
    assert (
        tries(done) == 3 and "[sft@r0] out of reach at try 3 of 3: not tried again" in done.stdout
    )
    assert "[gate_sft@r0]" not in done.stdout
    assert "rondo: Unreachable: sft@r0: " in done.stderr and "no answer" in done.stderr


def test_what_is_wrong_is_tried_once(project: Path, api: str) -> None:
    done = rondo_run(project, api, "sft.max_steps=1", "0,0")
    assert done.returncode == 2
    assert tries(done) == 1 and "tried again" not in done.stdout
    assert "rondo: BadInput: sft@r0: " in done.stderr and "rows missing" in done.stderr


def test_the_waits_are_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDO_NETWORK_WAITS", raising=False)
    assert retries.retry_delays() == [10, 60, 300]
    for said, expected in (("", []), ("1, 0.5", [1, 0.5])):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", said)
        assert retries.retry_delays() == expected
    for said in ("soon", "1,-2", "inf"):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", said)
        with pytest.raises(BadInput, match=rf"RONDO_NETWORK_WAITS={said}: expected seconds"):
            retries.retry_delays()
