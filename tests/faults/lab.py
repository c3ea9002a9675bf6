"""A project that faults happen to: the whole pipeline on a random model, stage by stage.

`build` runs every stage once without a fault. It keeps a copy of the project before each stage, the
points at which the stage, DVC and the run change files, and the results, with which every trial is
compared. Its fault happens in a copy.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from flows.core.config import resolve, write_params
from flows.execution import dvc_stages, fork_server
from tests.clones import clone_of_working_tree
from tests.paths import ROOT

INJECTION = Path(__file__).with_name("injection")
RESULTS = ("rounds", "gates", "reports", "approvals", "badcases", "assets")
FILES = ("dvc.lock", "params.yaml")
DRIVER = "tests.faults.drive"
WAIT_SECONDS = 60  # for processes that end with another


@dataclass(frozen=True)
class Point:
    """A change of a file by a process, before it happens (injection/sitecustomize.py)."""

    victim: str
    operation: str
    path: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.victim}: {self.operation} {self.path} #{self.occurrence}"


@dataclass(frozen=True)
class Ended:
    """A run of one stage: exit code, output, the victim's process if a fault struck."""

    code: int
    output: str
    struck: str

    def steps(self) -> list[int]:
        """The numbers of the training steps that the stage printed as done."""
        printed = re.findall(r"\] step (\d+)/(?!.*resumes from here)", self.output)
        return [int(step) for step in printed]


@dataclass(frozen=True)
class Lab:
    """folder: of copies and results. python: an interpreter with the injection. environment: of
    its processes.
    """

    folder: Path
    python: str
    environment: dict[str, str]

    def addresses(self) -> list[str]:
        """All stages that have run, in their order."""
        names: list[str] = json.loads((self.folder / "addresses.json").read_text())
        return names

    def before(self, address: str) -> Path:
        return self.folder / "before" / address

    def points(self, address: str) -> list[Point]:
        """All points of a stage, in their order."""
        lines = (self.folder / f"{address}.points").read_text().splitlines()
        return [Point(**json.loads(line)) for line in lines]

    def results(self, address: str) -> dict[str, str]:
        """Hashes of the results by file, after a stage without a fault."""
        hashes: dict[str, str] = json.loads((self.folder / f"{address}.results").read_text())
        return hashes

    def run(self, project: Path, address: str, fault: dict[str, object] | None = None) -> Ended:
        """Bring a stage up to date."""
        return run_with([self.python, "-m", DRIVER, address], project, self.environment, fault)

    def run_traced(self, project: Path, address: str) -> None:
        """Bring a stage up to date, and record its points and results."""
        trace = self.folder / f"{address}.points"
        trace.touch()
        ended = self.run(project, address, {"trace": str(trace)})
        assert ended.code == 0, ended.output
        (self.folder / f"{address}.results").write_text(json.dumps(hashes_of(project)))


def run_with(
    command: list[str],
    project: Path,
    environment: dict[str, str],
    fault: dict[str, object] | None,
) -> Ended:
    """Run a command in a project; returns when all processes of the project have ended.

    Args:
        fault: for RONDO_FAULT, but for the file `struck`.
    """
    with TemporaryDirectory() as folder:
        struck = Path(folder, "struck")
        plan = {"RONDO_FAULT": json.dumps(fault | {"struck": str(struck)})} if fault else {}
        ended = subprocess.run(
            command,
            cwd=project,
            env=environment | plan,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        wait_for_processes(project)
        return Ended(ended.returncode, ended.stdout, struck.read_text() if struck.exists() else "")


def rondo(project: Path, command: Sequence[str], fault: dict[str, object] | None = None) -> Ended:
    """`rondo COMMAND` in a project."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RONDO_")
    } | {"PYTHONPATH": f"{INJECTION}:{ROOT}"}
    return run_with([sys.executable, "-m", "flows.cli", *command], project, environment, fault)


Kill = tuple[str, str, int]  # operation, path, occurrence


def kill_at(project: Path, command: Sequence[str], kill: Kill) -> Ended:
    """`rondo COMMAND`, whose own process is killed at a point."""
    operation, path, occurrence = kill
    point = {"operation": operation, "path": path, "occurrence": occurrence}
    return rondo(project, command, point | {"victim": "flows.cli", "do": "SIGKILL"})


@contextmanager
def server(folder: Path) -> Iterator[Lab]:
    """A lab in `folder` whose processes start from a fork server with the injection."""
    environment = {
        name: value for name, value in os.environ.items() if name != fork_server.VARIABLE
    } | {"PYTHONPATH": f"{INJECTION}:{ROOT}", "DVC_SITE_CACHE_DIR": str(folder / "dvc")}
    python = folder / f"python-{time.monotonic_ns()}"
    python.mkdir(parents=True)
    process = fork_server.start(python, environment)
    assert process, "faults are injected into forked processes: Linux only"
    stand_in = str(python / "python")
    try:
        yield Lab(folder, stand_in, environment | {fork_server.VARIABLE: stand_in})
    finally:
        process.kill()
        process.communicate()


def build(lab: Lab, last: str | None = None) -> None:
    """Run all stages of a round without a fault, up to `last`."""
    project = clone_of_working_tree(lab.folder / "project")
    with chdir(project):
        write_params(resolve("tiny", 1))
        addresses = dvc_stages.stage_order(["r0"])
        addresses = addresses[: addresses.index(last or addresses[-1]) + 1]
        (lab.folder / "addresses.json").write_text(json.dumps(addresses))
        subprocess.run([sys.executable, "-m", "stages.assets.inputs"], check=True)
        # copies are faster without what no stage reads, and with a packed git folder
        for name in ("bench", "docs", "tests"):
            shutil.rmtree(name)
        subprocess.run(["git", "gc", "-q"], check=True)
        # else each copy would compile what it imports
        subprocess.run([sys.executable, "-m", "compileall", "-q", "flows", "stages"])
    for address in addresses:
        copy(project, lab.before(address))
        lab.run_traced(project, address)


@contextmanager
def with_bug(lab: Lab, address: str, file: str, old: str, new: str) -> Iterator[Lab]:
    """A lab for one stage, whose code has a planted bug; its results are those with the bug and
    without a fault.
    """
    buggy = replace(lab, folder=lab.folder / "bugs" / f"{time.monotonic_ns()}")
    code = copy(lab.before(address), buggy.before(address)) / file
    text = code.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    code.write_text(text.replace(old, new))
    project = copy(buggy.before(address), buggy.folder / "project")
    buggy.run_traced(project, address)
    yield buggy
    shutil.rmtree(buggy.folder)


def copy(project: Path, folder: Path) -> Path:
    """A copy of a project, with its modification times."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", project, folder], check=True)
    return folder


def hashes_of(project: Path) -> dict[str, str]:
    """sha256 of each result, and of what was not finished, by its path in the project."""
    files = [project / name for name in FILES] + list(project.glob(".*.tmp"))
    for name in RESULTS:
        files += (file for file in (project / name).rglob("*") if file.is_file())
    return {
        str(file.relative_to(project)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.exists()
    }


def without_report(hashes: dict[str, str]) -> dict[str, str]:
    """The report has times."""
    return {
        name: digest
        for name, digest in hashes.items()
        if name not in ("reports/report.html", "reports/summary.md")
    }


def wait_for_processes(project: Path) -> None:
    """Wait until no process works in the project.

    Raises:
        AssertionError: one is left after WAIT_SECONDS, an orphan.
    """
    end = time.monotonic() + WAIT_SECONDS
    while orphans := processes_in(project):
        assert time.monotonic() < end, f"orphans: {orphans}"
        time.sleep(0.05)


def processes_in(project: Path) -> list[str]:
    """The processes whose working directory is in the project."""
    commands = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(project):
                commands.append(f"{process.pid} {process.cmdline()}")
        except (psutil.Error, OSError):
            continue
    return commands


@dataclass(frozen=True)
class Trial:
    """What a fault did: the run that it struck, the run after it, and the results that differ from
    those without a fault. struck: whether it happened, and to the process that it was meant for.
    """

    fault: str
    struck: bool
    first: Ended
    second: Ended
    differ: tuple[str, ...]

    @property
    def kind(self) -> str:
        """`missed`: the fault did not happen. `stopped`: the second run ended with an error.
        `different`: it ended well, with other results. `again`: it repeated training steps.
        `identical`: the rest.
        """
        if not self.struck:
            return "missed"
        if self.second.code:
            return "stopped"
        if self.differ:
            return "different"
        # a step is printed before its state is saved
        done, repeated = self.first.steps(), self.second.steps()
        return "again" if done and repeated and repeated[0] < done[-1] else "identical"

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.fault}\n{self.differ}\n"
            f"--- first, code {self.first.code}\n{self.first.output[-1500:]}\n"
            f"--- second, code {self.second.code}\n{self.second.output[-1500:]}"
        )


def run_trial(
    lab: Lab, address: str, point: Point, do: str = "SIGKILL", then: Sequence[Point] = ()
) -> Trial:
    """A fault at a point, in a copy; then the same command until no fault is left.

    Args:
        then: points of faults in the runs that follow.
    """
    project = copy(lab.before(address), lab.folder / "trials" / f"{time.monotonic_ns()}")
    try:
        first = lab.run(project, address, asdict(point) | {"do": do})
        for later in then:
            lab.run(project, address, asdict(later) | {"do": do})
        second = lab.run(project, address)
        differ = differences(hashes_of(project), lab.results(address))
    finally:
        shutil.rmtree(project, ignore_errors=True)
    struck = point.victim.replace(".", "/") in first.struck
    return Trial(f"{do}, {address}, {point}", struck, first, second, differ)


def differences(after: dict[str, str], expected: dict[str, str]) -> tuple[str, ...]:
    """The results that are not those without a fault."""
    names = sorted(after.keys() | expected)
    return tuple(name for name in names if after.get(name) != expected.get(name))
