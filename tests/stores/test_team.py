"""A team: one Prefect server that asks for a string, and a worker of another user, in another clone
under another home, which shares with the others only git, the DVC remote and the servers.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml

from stages.lib.core.files import file_hash
from tests.flows.conftest import make_project
from tests.paths import ROOT
from tests.servers import free_port, of_project, read_until, request, until
from tests.stores.conftest import BUCKET, Stores, query, wait_for

AUTH = "team:s3cret"


@dataclass
class Team:
    """person: the clone of somebody who starts runs. machine: the clone of the worker, which has
    the variables `environment` and belongs to `user` (None: the person). git: the bare repository
    of both. api: Prefect's, with the string.
    """

    stores: Stores
    person: Path
    machine: Path
    git: Path
    api: str
    environment: dict[str, str]
    user: str | None
    worker: "subprocess.Popen[str]" = field(init=False)

    def start_worker(self) -> None:
        command = ["worker", "--name", "host-b", "--push", "origin"]
        self.worker = subprocess.Popen(
            [self.stores.python, "-m", "flows.cli", *command],
            cwd=self.machine,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **as_user(self.user),
        )

    def deployment(self, name: str) -> Any:
        return request(f"{self.api}/deployments/name/{name}/{name}-host-b")

    def start(self, *settings: str) -> str:
        """A run on the machine, from the form; returns its id."""
        pipeline = self.deployment("rlhf-pipeline")["id"]
        filled = {"parameters": {"settings": settings}}
        return str(request(f"{self.api}/deployments/{pipeline}/create_flow_run", filled)["id"])

    def state(self, run: str) -> str:
        return str(request(f"{self.api}/flow_runs/{run}")["state_name"])

    def branch(self, run: str) -> str:
        [name] = [name for name in self.branches() if name.endswith(f"-{run[:8]}")]
        return name

    def branches(self) -> list[str]:
        listing = run_in(self.person, {}, "git", "ls-remote", "origin", "runs/*")
        return [line.rpartition("refs/heads/")[2] for line in listing.splitlines()]


def as_user(user: str | None) -> dict[str, Any]:
    """Arguments of `subprocess`."""
    return {} if user is None else {"user": user, "group": "nogroup", "extra_groups": []}


def other_user(python: str) -> str | None:
    """Debian's `nobody`, if these tests can start programs as other users, and these can read
    Python's packages.
    """
    if os.geteuid() != 0:
        return None
    command = [python, "-c", "import prefect, flows.cli"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": "/nonexistent"}
    tried = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, **as_user("nobody")
    )
    return "nobody" if tried.returncode == 0 else None


def run_in(
    folder: Path, environment: dict[str, str], *command: str, user: str | None = None
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        **as_user(user),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Other users can enter it, unlike pytest's."""
    made = Path(mkdtemp(prefix="rondo-team-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def team(stores: Stores, folder: Path) -> Iterator[Team]:
    """With the commands of docs/scale.md."""
    person, machine, bare = folder / "person", folder / "machine", folder / "git"
    user = other_user(stores.python)
    query(f"{stores.postgres}/postgres", "create database team")
    person.mkdir(0o700)
    make_project(person)
    (person / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text())
    (person / "flows").symlink_to(ROOT / "flows")
    of_person = stores.environment(folder / "person-home") | {"PYTHONPATH": str(ROOT)}
    dvc = (stores.python, "-m", "dvc", "remote")
    run_in(person, of_person, *dvc, "add", "-d", "team", f"s3://{BUCKET}/team")
    run_in(person, of_person, *dvc, "modify", "team", "endpointurl", stores.s3)
    run_in(person, of_person, "git", "add", "-A")
    run_in(person, of_person, "git", "commit", "-qm", "a team's project")
    run_in(folder, of_person, "git", "clone", "-q", "--bare", str(person), str(bare))
    git_port, port = free_port(), free_port()
    origin = f"git://127.0.0.1:{git_port}/git"
    run_in(person, of_person, "git", "remote", "add", "origin", origin)
    server = of_person | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": AUTH,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": stores.postgres.replace(
            "postgresql://", "postgresql+asyncpg://"
        )
        + "/team",
    }
    of_worker = stores.environment(folder / "machine-home") | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": AUTH,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PWD": str(folder),
    }
    del of_worker["PREFECT_SERVER_DATABASE_CONNECTION_URL"]  # only the server's
    machine.mkdir()
    if user:
        for owned in (machine, folder / "machine-home"):
            shutil.chown(owned, user, "nogroup")
    daemon = ["git", "daemon", "--export-all", "--enable=receive-pack", "--listen=127.0.0.1"]
    commands = (
        [*daemon, f"--port={git_port}", f"--base-path={folder}"],
        [stores.python, "-m", "prefect", "server", "start", "--port", port],
    )
    with (folder / "server.log").open("w") as log:
        processes = [
            subprocess.Popen(command, env=os.environ | server, stdout=log, stderr=log, cwd=folder)
            for command in commands
        ]
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health", processes[1])
        run_in(machine, of_worker, "git", "clone", "-q", origin, ".", user=user)
        refused = subprocess.run(
            [stores.python, "-m", "flows.cli", "worker", "--name", "host-b"],
            cwd=machine,
            env=os.environ | of_worker | {"PREFECT_API_AUTH_STRING": "team:guess"},
            capture_output=True,
            text=True,
            **as_user(user),
        )
        assert refused.returncode == 4, refused.stderr
        assert "401" in refused.stderr and "PREFECT_API_AUTH_STRING is the string" in refused.stderr
        api = f"http://{AUTH}@127.0.0.1:{port}/api"
        made = Team(stores, person, machine, bare, api, of_worker, user)
        made.start_worker()
        assert "rlhf-pipeline-host-b, next-round-host-b" in read_until(made.worker, "Deployments")
        yield made
        made.worker.send_signal(signal.SIGINT)
        assert made.worker.wait(60) == 0
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)


def test_the_worker_is_another_user(team: Team) -> None:
    if team.user is None:
        pytest.skip("needs root, and a Python that other users can read: PYTHON=/usr/bin/python3")
    users = {process.username() for process in of_project(team.machine, "worker")}
    assert users == {team.user} != {team.person.owner()}
    reading = subprocess.run(["ls", team.person], capture_output=True, **as_user(team.user))
    assert reading.returncode != 0


def test_a_run_on_another_machine_is_pushed_and_recorded(team: Team) -> None:
    run = team.start("seed=3")
    until(lambda: team.state(run) == "Completed", 300)
    of_run = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    artifacts = {a["key"]: a["data"] for a in request(f"{team.api}/artifacts/filter", of_run)}
    assert {"sft-r0", "gate-sft-r0", "summary", "mlflow", "report"} <= artifacts.keys()
    assert f"({team.stores.mlflow}/#/experiments/" in artifacts["mlflow"]
    names = query(f"{team.stores.postgres}/mlflow", "select name from runs")
    assert any(run[:8] in name for name in names)
    # the person gets branch and files, and shares no folder with the machine
    until(lambda: bool(team.branches()))
    environment = team.stores.environment(team.person.with_name("person-home"))
    run_in(team.person, environment, "git", "fetch", "-q", "origin")
    run_in(team.person, environment, "git", "checkout", "-q", team.branch(run))
    run_in(team.person, environment, team.stores.python, "-m", "dvc", "pull", "-q")
    [workspace] = (team.machine / ".rondo/workspaces").iterdir()
    for name in ("sft/data", "sft/samples.jsonl", "evaluate/data"):
        pulled, made = (folder / "rounds/r0" / name for folder in (team.person, workspace))
        assert file_hash(pulled) == file_hash(made)
    assert yaml.safe_load((team.person / "params.yaml").read_text())["seed"] == 3


def test_a_gate_is_approved_from_elsewhere(team: Team) -> None:
    run = team.start("gates.sft.loss_drop=0.9", "gates.sft.policy=ask")
    until(lambda: team.state(run) == "Suspended", 300)
    wanted = f"{team.api}/flow_runs/{run}/input/filter", {"prefix": "suspended-"}
    until(lambda: request(*wanted))
    decision = {"decision": "approve", "by": "Ada", "reason": "a test"}
    answer = request(f"{team.api}/flow_runs/{run}/resume", {"run_input": decision})
    assert answer["status"] == "ACCEPT"
    until(lambda: team.state(run) == "Completed", 300)
    branch = team.branch(run)
    shown = ("git", f"--git-dir={team.git}", "show")
    files = run_in(team.person, {}, *shown, "--name-only", "--format=", f"{branch}").split()
    [approval] = [name for name in files if name.startswith("approvals/")]
    text = run_in(team.person, {}, *shown, f"{branch}:{approval}")
    assert "Ada" in text and "a test" in text


def test_a_run_is_cancelled_from_elsewhere(team: Team) -> None:
    run = team.start("sft.max_steps=2")  # sleeps
    until(lambda: bool(of_project(team.machine, "stage.py")), 120)
    request(f"{team.api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    until(lambda: not of_project(team.machine, "stage.py"), 120)
    until(lambda: team.state(run) != "Cancelling", 120)
    assert team.state(run) == "Cancelled"


def test_a_machine_has_slots_of_its_own(team: Team) -> None:
    limits = request(f"{team.api}/v2/concurrency_limits/filter", {})
    names = [limit["name"] for limit in limits]
    # Prefect's own are named deployment:...
    assert [name for name in names if ":" not in name] == ["rondo-compute-host-b"]


def test_the_end_of_a_worker_interrupts_its_runs_and_the_next_one_resumes_them(team: Team) -> None:
    run = team.start("sft.max_steps=2", "seed=5")
    until(lambda: bool(of_project(team.machine, "stage.py")), 120)
    team.worker.send_signal(signal.SIGINT)
    assert team.worker.wait(60) == 0
    until(lambda: not of_project(team.machine, "stage.py"))
    assert team.state(run) == "CutOff"
    team.start_worker()
    assert f"resumes: {run}" in read_until(team.worker, "Deployments")
    until(lambda: bool(of_project(team.machine, "stage.py")), 120)
    request(f"{team.api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    until(lambda: team.state(run) == "Cancelled", 120)
