"""`rondo run` against a real Prefect server: retries of a stage, and compute slots."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient

from flows.core.config import resolve, write_params
from flows.execution.dvc_stages import command_environment
from flows.orchestration import retries
from flows.orchestration.concurrency import LIMIT
from flows.orchestration.server import prefect_environment
from flows.tracking.mlflow_store import experiment_of
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.params import load_params
from tests.paths import ROOT
from tests.servers import free_port, read_until, request, until


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests of this file: starting it takes most of the time."""
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


def start_run(
    project: Path, api: str, *arguments: str, waits: str = "", mlflow: str = "off"
) -> "subprocess.Popen[str]":
    environment = {
        "RONDO_NETWORK_WAITS": waits,
        "MLFLOW_TRACKING_URI": mlflow,
        "PREFECT_API_URL": api,
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", *arguments],
        cwd=project,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rondo_run(
    project: Path, api: str, *arguments: str, waits: str = "", mlflow: str = "off"
) -> subprocess.CompletedProcess[str]:
    run = start_run(project, api, *arguments, waits=waits, mlflow=mlflow)
    stdout, stderr = run.communicate(timeout=600)
    return subprocess.CompletedProcess(run.args, run.returncode, stdout, stderr)


def count_tries(done: subprocess.CompletedProcess[str]) -> int:
    return done.stdout.count("[sft@r0] step 1/3")


def states(api: str, address: str) -> set[str]:
    """The names of all states that a stage had."""
    runs = [run["id"] for run in request(f"{api}/task_runs/filter", {}) if run["name"] == address]
    return {
        state["name"]
        for run in runs
        for state in request(f"{api}/task_run_states/?task_run_id={run}")
    }


def test_an_unreachable_server_is_tried_a_second_time(project: Path, api: str) -> None:
    done = rondo_run(project, api, "--set", "sft.max_steps=7", waits="1")
    assert done.returncode == 0, done.stderr
    assert (
        count_tries(done) == 2
        and "[sft@r0] out of reach at try 1 of 2: tried again in 1 s" in done.stdout
    )
    assert "[evaluate@r0] ran" in done.stdout
    # the server may record states with a delay
    until(lambda: {"AwaitingRetry", "Completed"} <= states(api, "sft@r0"))


def test_a_server_that_stays_unreachable_ends_the_run_with_4(project: Path, api: str) -> None:
    done = rondo_run(project, api, "--set", "sft.max_steps=8", waits="0,1")
    assert done.returncode == 4
    assert (
        count_tries(done) == 3
        and "[sft@r0] out of reach at try 3 of 3: not tried again" in done.stdout
    )
    assert "[gate_sft@r0]" not in done.stdout
    assert "rondo: Unreachable: sft@r0: " in done.stderr and "no answer" in done.stderr


def test_another_failure_is_not_retried(project: Path, api: str) -> None:
    done = rondo_run(project, api, "--set", "sft.max_steps=1", waits="0,0")
    assert done.returncode == 2
    assert count_tries(done) == 1 and "tried again" not in done.stdout
    assert "rondo: BadInput: sft@r0: " in done.stderr and "rows missing" in done.stderr


def test_a_run_that_begins_again_keeps_its_own_params_and_rounds_of_others(
    project: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    failed = rondo_run(project, api, "--set", "gates.sft.loss_drop=0.9")
    assert failed.returncode == GateFailed.exit_code, failed.stderr
    other_run = resolve("keep", 2, ["gates.sft.loss_drop=0.1", "seed=5"])
    write_params(other_run)

    again = rondo_run(project, api)
    assert again.returncode == GateFailed.exit_code, again.stderr
    params = load_params()
    assert (params.gates.sft.loss_drop, params.seed) == (0.9, 0)
    assert list(params.rounds) == ["r0", "r1"]
    [name] = {line for line in failed.stdout.splitlines() if line.startswith("run ")}
    assert name in again.stdout.splitlines()


def test_the_delays_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDO_NETWORK_WAITS", raising=False)
    assert retries.retry_delays() == [10, 60, 300]
    for value, expected in (("", []), ("1, 0.5", [1, 0.5])):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", value)
        assert retries.retry_delays() == expected
    for value in ("soon", "1,-2", "inf"):
        monkeypatch.setenv("RONDO_NETWORK_WAITS", value)
        with pytest.raises(BadInput, match=rf"RONDO_NETWORK_WAITS={value}: expected seconds"):
            retries.retry_delays()


def test_only_stages_that_compute_wait_for_a_slot(project: Path, api: str) -> None:
    assert rondo_run(project, api, "--set", "seed=0").returncode == 0
    slot = {"names": [LIMIT], "slots": 1, "mode": "concurrency", "lease_duration": 600}
    lease = request(f"{api}/v2/concurrency_limits/increment-with-lease", slot)["lease_id"]

    # the gate runs, all other stages are unchanged
    done = rondo_run(project, api, "--set", "gates.sft.loss_drop=0.1")
    assert done.returncode == 0, done.stderr
    assert "[gate_sft@r0] ran" in done.stdout and "waiting" not in done.stdout

    run = start_run(project, api, "--set", "seed=1")
    waiting = read_until(run, "waiting: other runs use 1 of 1 slots")
    assert "step" not in waiting
    request(f"{api}/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
    stdout, stderr = run.communicate(timeout=600)
    assert run.returncode == 0, stderr
    assert "[prepare@r0] ran" in stdout


def test_an_edited_data_file_is_seen_by_isolated_runs_and_by_plain_dvc(
    project: Path, api: str, empty: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    database = f"sqlite:///{shutil.copy(empty, store)}"
    data = project / "pairs.jsonl"
    data.write_text('{"label": 1}\n')
    settings = ("assets.data=files", "prepare.sources=[{path: pairs.jsonl}]")
    isolated = [*(f"--set={setting}" for setting in settings), "--isolated"]

    first = rondo_run(project, api, *isolated, mlflow=database)
    assert "[prepare@r0] ran" in first.stdout, first.stderr
    assert "changed since the last run" not in first.stdout
    again = rondo_run(project, api, *isolated)
    assert "[prepare@r0] restored" in again.stdout, again.stderr

    data.write_text('{"label": 0}\n')
    edited = rondo_run(project, api, *isolated)
    assert "changed since the last run: pairs.jsonl" in edited.stdout, edited.stderr
    assert "[prepare@r0] ran" in edited.stdout

    rondo_run(project, api, *isolated[:-1], mlflow=database)
    client = MlflowClient(database)
    runs = client.search_runs(
        [experiment_of(client)], "tags.`rondo.address` = 'pipeline'", order_by=["start_time"]
    )
    assert [run.data.tags["isolated"] for run in runs] == ["True", "False"]
    assert len({run.data.tags["project"] for run in runs}) == 1
    data.write_text('{"label": 2}\n')
    for expected in (True, False):
        repro = subprocess.run(
            [sys.executable, "-m", "dvc", "repro", "prepare@r0"],
            cwd=project,
            env=command_environment() | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("[prepare@r0] step" in repro.stdout) is expected, repro.stdout
