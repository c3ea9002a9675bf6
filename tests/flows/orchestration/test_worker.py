"""`rondo worker`: its names in Prefect, and what it refuses. tests/stores has it run."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from prefect.client.orchestration import SyncPrefectClient

from flows import cli
from flows.core import interrupts
from flows.core.services import LOCK, prefect_pages
from flows.orchestration import concurrency, worker
from flows.orchestration.service_processes import service_environment, services_until_signal
from stages.lib.core.errors import BadInput
from tests.paths import ROOT
from tests.servers import NOWHERE, rondo


def test_each_worker_has_deployments_and_a_pool_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert worker._own_deployments(worker.OWN, tmp_path) == []
    assert worker.OWN.pool == "rondo"
    own = worker.Worker("gpu-1")
    option, path = worker._own_deployments(own, tmp_path)
    assert option == "--prefect-file"
    shipped, made = (yaml.safe_load(Path(file).read_text()) for file in ("prefect.yaml", path))
    assert made["pull"] == shipped["pull"]
    for before, after in zip(shipped["deployments"], made["deployments"], strict=True):
        changes = {"name": f"{before['name']}-gpu-1", "work_pool": {"name": "rondo-gpu-1"}}
        assert after == before | changes


def test_a_machine_has_compute_slots_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert concurrency.limit_name() == "rondo-compute"
    monkeypatch.setenv("RONDO_WORKER", "gpu-1")
    assert concurrency.limit_name() == "rondo-compute-gpu-1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set PREFECT_API_URL to the team's Prefect server"),
        (["--name", "gpu 1"], "--name gpu 1: expected a-z, 0-9 and single hyphens"),
        (["--push", "team"], "--push team: `git remote` lists no such remote"),
        (["--push", "origin"], "DVC has no default remote: `dvc remote add -d NAME URL`"),
    ],
)
def test_what_a_worker_lacks_is_named(
    project: Path,
    as_before: None,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    subprocess.run(["git", "remote", "add", "origin", "elsewhere"], check=True)
    assert cli.exit_code(["worker", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(project: Path) -> None:
    ended = rondo(project, "worker", PREFECT_API_URL=f"{NOWHERE}/api")
    assert ended.returncode == 4, ended.stderr
    assert "check PREFECT_API_URL, and that PREFECT_API_AUTH_STRING" in ended.stderr


def test_a_folder_has_one_worker(project: Path) -> None:
    (project / ".rondo").mkdir(exist_ok=True)
    with FileLock(project / ".rondo" / LOCK):
        ended = rondo(project, "worker", PREFECT_API_URL=f"{NOWHERE}/api")
    assert (ended.returncode, "already runs in this folder" in ended.stderr) == (2, True)


def test_a_name_is_of_one_folder_of_one_machine(prefect: SyncPrefectClient, tmp_path: Path) -> None:
    own = worker.Worker("of-this-test")
    worker._check_name(own, tmp_path)  # there is no such pool yet
    from flows.orchestration import prefect_requests

    prefect_requests.create_pool(own.pool)
    name = own.process_name(tmp_path / "another")  # of another folder of this machine
    prefect.request(
        "POST",
        "/work_pools/{name}/workers/heartbeat",
        path_params={"name": own.pool},
        json={"name": name, "heartbeat_interval_seconds": 30},
    )
    with pytest.raises(BadInput, match=f"{name} is online under this name: choose another"):
        worker._check_name(own, tmp_path)
    assert not worker._is_online(own, own.process_name(tmp_path))
    assert worker._is_online(own, name)
    worker._check_name(own, tmp_path / "another")  # started again


@pytest.mark.parametrize("end", [interrupts.Interrupted(signal.SIGTERM), BadInput("wrong")])
def test_the_end_of_a_command_ends_its_processes(
    tmp_path: Path, as_before: None, end: BaseException
) -> None:
    error = suppress(BadInput)  # a signal is no error
    with error, services_until_signal("rondo", tmp_path) as services:
        services.start("pages", "http.server", "0", "--bind", "127.0.0.1")
        assert services.processes["pages"].poll() is None
        raise end
    assert services.processes["pages"].wait(10) != 0


def test_a_worker_shares_no_temporary_folder_with_other_users(
    tmp_path: Path, as_before: None
) -> None:
    """Prefect's worker makes `runner_storage` there, for the first user of the machine."""
    show = "from prefect.runner import Runner; print(Runner()._tmp_dir.parent.parent)"
    with services_until_signal("rondo", tmp_path) as services:
        shown = subprocess.run(
            [sys.executable, "-c", show],
            env=service_environment() | services.variables,
            capture_output=True,
            text=True,
        )
        folder = Path(shown.stdout.strip())
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_pages_are_those_of_the_server_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://team:secret@prefect.example.org:4200/api/")
    assert prefect_pages(tmp_path) == "http://prefect.example.org:4200"
    monkeypatch.delenv("PREFECT_API_URL")
    assert prefect_pages(tmp_path) == "http://127.0.0.1:4200"
