"""Projects that faults happen to, and commands in them.

A chain is a project and the commands that a person runs in it, one after the other. Each command
runs once without a fault; its `State` has the project before and after it. A fault happens in a
copy of `before`; the results are compared with those in `after`.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from flows.core.config import resolve, write_params
from tests.clones import clone_of_working_tree
from tests.flows.conftest import make_project
from tests.paths import ROOT
from tests.servers import of_project

FULL = os.environ.get("RONDO_FAULTS") == "full"  # a sample of all faults: `make test-faults`
RESULTS = ("rounds", "gates", "reports", "approvals", "badcases", "assets")
WITH_TIMES = {"reports/report.html", "reports/summary.md"}
KILLED = ROOT / "tests/faults/killed"  # sitecustomize.py
WAIT_SECONDS = 60  # for processes that end with another
STAGES = (
    *("assets", "prepare@r0", "sft@r0", "gate_sft@r0", "annotate@r0", "reward@r0", "battery@r0"),
    *("gate_reward@r0", "champion@r0", "ppo@r0", "evaluate@r0", "capability@r0", "replay@r0"),
    "gate_promote@r0",
)


def rondo(*arguments: str) -> tuple[str, ...]:
    return ("-m", "flows.cli", *arguments)


WAITS = ("--set", "sft.max_steps=51")  # sft waits for the file `go` (tests/flows/conftest.py)
RUN = ("run", "--rounds", "1", *WAITS)
TWO_ROUNDS = rondo("run", "--rounds", "2", *WAITS)
ASKING = ("--set", "gates.sft.loss_drop=0.9", "--set", "gates.sft.policy=ask")
Commands = dict[str, tuple[str, ...]]
CHAINS: dict[str, Commands] = {
    # all stages on a random model
    "tiny": {address: ("-m", "tests.faults.drive", address) for address in STAGES},
    # the stages of tests/flows, a few lines each: what is tested is the run around them
    "small": {
        "one round": rondo(*RUN),
        "two rounds": TWO_ROUNDS,
        "begun again": (*TWO_ROUNDS, "--rerun", "r0"),
    },
    "asking": {
        "asks": rondo(*RUN, *ASKING),
        "approved": rondo("approve", "sft", "r0", "--by", "Ada", "--reason", "enough"),
    },
}


@dataclass(frozen=True)
class Ended:
    """A command that has ended: exit code, output, whether one of its processes was killed."""

    code: int
    output: str
    killed: bool = False

    def steps(self) -> list[int]:
        """The numbers of the training steps that the command printed as done."""
        printed = re.findall(r"\] step (\d+)/(?!.*resumes from here)", self.output)
        return [int(step) for step in printed]


@dataclass(frozen=True)
class State:
    """A folder with the projects `before` and `after` a command, and its number of changes."""

    folder: Path
    command: tuple[str, ...]

    @property
    def before(self) -> Path:
        return self.folder / "before"

    @property
    def after(self) -> Path:
        return self.folder / "after"

    def changes(self) -> int:
        """How many changes of files the command makes."""
        return (self.folder / "changes").stat().st_size


States = Callable[[str, str], State]


def states_of(
    built_once: Callable[..., Path], copy_tables: Callable[[Path], None], chain: str, name: str
) -> State:
    """The state of a command in a chain, after it and those before it have run once."""
    commands = CHAINS[chain]
    names = [*commands]

    def build(folder: Path) -> None:
        if name != names[0]:
            earlier = names[names.index(name) - 1]
            copy(states_of(built_once, copy_tables, chain, earlier).after, folder / "before")
        elif chain == "tiny":
            make_tiny(folder / "before")
        else:
            (folder / "before").mkdir()
            copy_tables(make_project(folder / "before"))
            (folder / "before/go").touch()
        ended = run(copy(folder / "before", folder / "after"), commands[name], folder / "changes")
        assert ended.code == 0 or "rondo approve" in ended.output, ended.output

    return State(built_once(f"{chain}-{name.replace(' ', '-')}", build), commands[name])


def make_tiny(folder: Path) -> None:
    """A clone with the preset tiny, without what no stage reads."""
    clone_of_working_tree(folder)
    with chdir(folder):
        write_params(resolve("tiny", 1))
        subprocess.run([sys.executable, "-m", "stages.assets.inputs"], check=True)
        for name in ("docs", "tests"):
            shutil.rmtree(name)
        subprocess.run(["git", "gc", "-q"], check=True)
        # else each copy would compile what it imports
        subprocess.run([sys.executable, "-m", "compileall", "-q", "flows", "stages"], check=True)


def environment(project: Path) -> dict[str, str]:
    """Of the processes in a project; they import tests/faults/killed as they start."""
    return os.environ | {
        "PYTHONPATH": f"{KILLED}:{ROOT}",
        "DVC_SITE_CACHE_DIR": str(project.parent / "dvc"),
    }


def run(
    project: Path, command: tuple[str, ...], counter: Path | None = None, kill_at: int = 0
) -> Ended:
    """Run `python COMMAND` in a project; returns when all processes of the project have ended.

    Args:
        counter: a file that has a byte per change of a file afterwards.
        kill_at: at which change the process that makes it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        counter = counter or Path(folder, "changes")
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=project,
            env=environment(project) | {"RONDO_KILL": f"{project}:{counter}:{kill_at}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        wait_for_processes(project)
        was_killed = counter.with_name(f"{counter.name}.killed").exists()
        return Ended(ended.returncode, ended.stdout, was_killed)


def wait_for_processes(project: Path) -> None:
    """Wait until no process works in the project.

    Raises:
        AssertionError: one is left after WAIT_SECONDS, an orphan.
    """
    end = time.monotonic() + WAIT_SECONDS
    while orphans := of_project(project):
        assert time.monotonic() < end, f"orphans: {orphans}"
        time.sleep(0.05)


def copy(project: Path, folder: Path) -> Path:
    """A copy of a project, with its modification times."""
    subprocess.run(["cp", "-a", project, folder], check=True)
    return folder


def differences(project: Path, other: Path) -> list[str]:
    """The results of two projects that are not the same bytes, or only in one of them; and what
    was not finished.
    """
    hashes, expected = hashes_of(project), hashes_of(other)
    return sorted(n for n in hashes | expected if hashes.get(n) != expected.get(n))


def hashes_of(project: Path) -> dict[str, str]:
    """md5 of each result by its path in the project."""
    files = [project / "dvc.lock", project / "params.yaml", *project.glob(".*.tmp")]
    files += [file for name in RESULTS for file in (project / name).rglob("*")]
    return {
        name: hashlib.md5(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file() and (name := str(file.relative_to(project))) not in WITH_TIMES
    }


def check_mlflow(database: Path) -> None:
    """MLflow has the whole curve of each stage, and no run that seems to go on."""
    client = MlflowClient(f"sqlite:///{database}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    for stage in ("prepare@r0", "sft@r0", "evaluate@r0"):
        curves = [
            [point.value for point in client.get_metric_history(run.info.run_id, "loss")]
            for run in runs
            if run.info.run_name == stage and run.info.status == "FINISHED"
        ]
        assert [1, 1 / 2, 1 / 3] in curves, (stage, curves)
    last = max(runs, key=lambda run: run.info.start_time)
    parent = last.data.tags.get("mlflow.parentRunId", last.info.run_id)
    assert client.get_run(parent).info.status == "FINISHED"
