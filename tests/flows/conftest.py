"""A small real DVC project: the stages and addresses of the real dvc.yaml, with a few lines of
Python for each but the real gate.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_LOGGING_TO_API_ENABLED,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from flows.core import interrupts
from flows.core.services import is_up, prefect_environment
from flows.execution import dvc_stages
from flows.tracking.mlflow_store import MlflowStore
from stages.lib.core.params import Params
from stages.lib.core.params.data import rounds
from tests.flows.reproduce import reproduce
from tests.paths import ROOT
from tests.servers import free_port, until

STAGE = """
import json, pathlib, sys, time, yaml
name, key = sys.argv[1], sys.argv[2]
if name == "assets":
    pathlib.Path("assets").mkdir(exist_ok=True)
    pathlib.Path("assets/start").write_text("EMPTY")
    sys.exit()
params = yaml.safe_load(open("params.yaml"))
folder = pathlib.Path("rounds", key, name)
folder.mkdir(parents=True, exist_ok=True)
work = pathlib.Path(".rondo/work", key, name)
work.mkdir(parents=True, exist_ok=True)
clock = open(work / "clock.jsonl", "w")
clock.write(json.dumps({"step": -1, "time": 1000.0}) + "\\n")
with open(folder / "metrics.jsonl", "w") as steps:
    for step in (1, 2, 3):
        steps.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
        clock.write(json.dumps({"step": step, "time": 1000.0 + step}) + "\\n")
        print(f"[{name}@{key}] step {step}/3  eta 0:0{3 - step}", flush=True)
if name == "sft" and params["sft"]["max_steps"] == 1:
    print("sft@r0: BadInput: rows missing", file=sys.stderr)
    sys.exit(2)
away = work / "away"
steps = params["sft"]["max_steps"]
if name == "sft" and (steps == 7 and not away.exists() or steps == 8):
    away.touch()
    print("sft@r0: Unreachable: no answer", file=sys.stderr)
    sys.exit(4)
if name == "sft" and params["sft"]["max_steps"] == 2:
    time.sleep(600)
if name == "sft" and params["sft"]["max_steps"] == 41:
    print("ERROR: failed to reproduce 'x': exited with 3\\nworker exited with 4")
    sys.exit(2)
while name == "sft" and params["sft"]["max_steps"] == 51 and not pathlib.Path("go").exists():
    time.sleep(0.1)
if name == "sft" and params["sft"]["max_steps"] == 3:
    raise ValueError("no such thing")
metrics = {"loss_before": 5.17, "loss_after": 4.67, "stopped": "completed"}
metrics |= {"net_win_rate_low": 0.1}
metrics |= {"memorised": 0.02, "memorised_demonstrations": 0.01}
metrics |= {"eos_rate_demonstrations": 0.9, "eos_rate": 0.8, "length_ratio": 1.0}
metrics |= {"repetition_3": 0.03, "repetition_3_demonstrations": 0.02}
if name == "evaluate":
    values = (("base", 0.1), ("sft", 0.26), ("ppo", 0.7))
    metrics = {"win_rate": 0.8}
    metrics |= {model: {"judge_score": value, "kl": 6.0} for model, value in values}
    metrics["checkpoints"] = {
        "step_00009": {"judge_score": 0.5, "kl": 3.0, "win_rate": 0.6},
        "step_00018": {"kl": 9.0, "win_rate": 0.9},
    }
(folder / "metrics.json").write_text(json.dumps(metrics))
data = folder / "data"
data.mkdir(exist_ok=True)
(data / "rows.jsonl").write_text(json.dumps({"id": key, "seed": params["seed"]}) + "\\n")
sample = {"id": "1", "prompt": [{"role": "user", "content": "Hi"}], "base": "a", "sft": "b"}
if name == "evaluate":
    sample |= {"sample": 0, "ppo": "c"}
    for model in ("base", "sft", "ppo"):
        sample |= {f"{model}_judge_score": 0.1, f"{model}_score": 0.1}
(folder / "samples.jsonl").write_text(json.dumps(sample) + "\\n")
"""


def dvc_yaml() -> dict[str, object]:
    """assets -> prepare -> sft -> gate_sft -> evaluate a round."""

    def stage(name: str, deps: list[str], params: list[str]) -> dict[str, object]:
        outs = ["data", "samples.jsonl", "metrics.jsonl"]
        do = {
            "cmd": f"python stage.py {name} ${{key}}",
            "deps": ["stage.py", *deps],
            "params": params,
            "outs": [f"rounds/${{key}}/{name}/{out}" for out in outs],
            "metrics": [{f"rounds/${{key}}/{name}/metrics.json": {"cache": False}}],
        }
        return {"foreach": "${rounds}", "do": do}

    gate = {
        "cmd": "python -m stages.gate --gate sft --round ${key}",
        "deps": ["approvals", "rounds/${key}/sft/metrics.json"],
        "params": ["gates.sft"],
        "outs": ["gates/${key}/sft.ok", "reports/${key}/gate_sft.json"],
    }
    return {
        "stages": {
            "assets": {
                "cmd": "python stage.py assets start",
                "deps": ["stage.py"],
                "outs": ["assets/start"],
            },
            "inputs": yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["inputs"],
            "prepare": stage("prepare", ["assets/start", "assets/inputs/data.json"], ["seed"]),
            "sft": stage("sft", ["rounds/${key}/prepare/data"], ["sft", "seed"]),
            "gate_sft": {"foreach": "${rounds}", "do": gate},
            "evaluate": stage(
                "evaluate", ["gates/${key}/sft.ok", "rounds/${key}/sft/data"], ["evaluate"]
            ),
        }
    }


def make_project(folder: Path, number: int = 1) -> Path:
    params = Params(rounds=rounds(number)).model_dump(mode="json")
    (folder / "stage.py").write_text(STAGE)
    (folder / "dvc.yaml").write_text(yaml.safe_dump(dvc_yaml(), sort_keys=False))
    (folder / "params.yaml").write_text(
        "# what a run is made of\n" + yaml.safe_dump(params, sort_keys=False)
    )
    (folder / ".gitignore").write_text(
        ".rondo/\n/assets/\n/gates/\n/reports/\n/rounds/**\n!/rounds/**/\n"
        "!/rounds/**/metrics.json\n!/rounds/*/params.yaml\n"
    )
    (folder / ".dvcignore").write_text(".rondo\n")
    (folder / "approvals").mkdir()
    (folder / "approvals/.gitkeep").touch()
    for command in (
        ["git", "init", "-q"],
        [sys.executable, "-m", "dvc", "init", "-q"],
        ["git", "add", "."],
        [sys.executable, "-m", "stages.assets.inputs"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", *identity, "commit", "-q", "-m", "start"], cwd=folder, check=True)
    for key, value in (("user.name", "t"), ("user.email", "t@t")):
        subprocess.run(["git", "config", key, value], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="session")
def made_project(built_once: Callable[..., Path]) -> Path:
    """git and DVC take seconds to make a project; a copy takes none."""
    return built_once("project", make_project)


def copy_project(original: Path, folder: Path) -> None:
    shutil.copytree(original, folder, symlinks=True, dirs_exist_ok=True)
    # the index knows the files of the original
    subprocess.run(["git", "update-index", "-q", "--refresh"], cwd=folder, check=True)


@pytest.fixture
def project(
    made_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_processes: None
) -> Path:
    """The project as working directory."""
    copy_project(made_project, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project_after(
    built_once: Callable[..., Path],
    made_project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast_processes: None,
) -> Callable[[str, Callable[[], object]], Path]:
    """A function that returns the project as working directory, in the state in which `build`
    leaves it. `build` works in it once in a session.
    """

    def copy_after(name: str, build: Callable[[], object]) -> Path:
        def build_in_copy(folder: Path) -> None:
            copy_project(made_project, folder)
            with chdir(folder):
                build()

        copy_project(built_once(name, build_in_copy), tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return copy_after


@pytest.fixture
def finished_project(project_after: Callable[..., Path]) -> Path:
    """The project as working directory, after all stages of its round have run."""

    return project_after("finished_project", lambda: reproduce(dvc_stages.stage_order(["r0"])))


@pytest.fixture
def as_before() -> Iterator[None]:
    """Signals and environment after a test in which a command of `rondo` runs in this process."""
    handlers = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    environment = dict(os.environ)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def empty(empty_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with our experiment, and no run."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_tables, folder / "mlflow.db")
    MlflowStore(f"sqlite:///{folder / 'mlflow.db'}")
    return folder / "mlflow.db"


@pytest.fixture(scope="module")
def shared_database(empty_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests of a file, whose runs differ by their names."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    return f"sqlite:///{shutil.copy(empty_tables, file)}"


@pytest.fixture
def database(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its URI, as a user names it; the working directory is a project's."""
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").touch()
    shutil.copy(empty, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory, prefect_tables: Path) -> Iterator[str]:
    """Prefect's server, one for all tests of a worker: starting it takes most of the time."""
    port, home = free_port(), tmp_path_factory.mktemp("prefect")
    environment = os.environ | prefect_environment(home)
    shutil.copy(prefect_tables, home / "prefect")
    command = [sys.executable, "-m", "flows.orchestration.prefect_server", port]
    with open(os.devnull, "w") as nowhere:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=nowhere, stderr=nowhere
        )
    try:
        until(lambda: is_up(f"http://127.0.0.1:{port}/api/health"), 300)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def prefect(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SyncPrefectClient]:
    """A client of that server, which the flows of this process use too."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    settings = {PREFECT_API_URL: api, PREFECT_HOME: tmp_path / ".rondo/prefect"}
    off = {PREFECT_LOGGING_TO_API_ENABLED: False, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
    with (
        temporary_settings(settings | off),
        get_client(sync_client=True) as client,
    ):
        yield client
