"""Run the stages of dvc.yaml one at a time, in the order of their dependencies.

An address is DVC's name of a stage: `assets`, `sft@r0`.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from flows.core import locks
from flows.core.addresses import split_address
from flows.core.verdicts import gate_message
from flows.execution import fork_server, process_guard
from flows.execution.repro import dvc_message
from stages.lib.core.errors import (
    STORAGE_ADVICE,
    BadInput,
    GateFailed,
    OutOfMemory,
    RondoError,
    StorageFailed,
    Unreachable,
    memory_advice,
    storage_advice,
)
from stages.lib.core.files import (
    RESUME_STATE,
    remove_unfinished,
    stage_dir,
    work_dir,
)
from stages.lib.core.judge_answers import answers_are_gone
from stages.lib.core.progress import progress, reporting
from stages.lib.core.reading import read_yaml

INPUTS = "inputs"  # always changed for DVC: a run calls it first if a file of the user has changed
ERROR_LINES = 15  # of a failed stage's output, in the error message
# Without a line from a stage, until a run prints one itself: stages print one every 10 s.
QUIET_SECONDS = 15.0
CLOCK_SECONDS = 10.0  # that the start of a process may differ, if the clock was set
RWLOCK = Path(".dvc/tmp/rwlock")  # the paths that DVC's running commands read and write
DVC_TEMPORARY = re.compile(r"\.[\w-]{22}\.tmp")
WRITING_SECONDS = 1.0  # enough for a DVC that has made a folder to write the file in it


class Outcome(str, Enum):
    """How a stage was brought up to date; `restored`: its outputs come from DVC's cache."""

    ran = "ran"
    restored = "restored"
    unchanged = "unchanged"


@contextmanager
def open_repo() -> Iterator[Any]:
    """Open the working directory as a DVC repository.

    Raises:
        BadInput: DVC or git failed within the block.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError

    try:
        with Repo(".", _wait_for_lock=True) as repo:
            remove_stale_rwlock(repo)
            yield repo
    except (DvcException, SCMError) as error:
        # DVC's own messages have no next step: that of a damaged dvc.lock, and without git
        locks.read_locks()
        message = dvc_message(error)
        if message.endswith("is not a git repository"):
            message += ". Next: `git init` makes one; `dvc config core.no_scm true`: work without"
        raise BadInput(f"dvc: {message}") from None


def _index_and_graph(repo: Any) -> tuple[Any, Any]:
    """DVC's index of the stages of dvc.yaml, without data of the user that DVC tracks; and a
    networkx graph of their addresses, with an edge from each stage to those that depend on it.
    """
    import networkx
    from dvc.repo.index import Index

    index = Index.from_file(repo, "dvc.yaml")
    return index, networkx.relabel_nodes(index.graph, lambda stage: stage.addressing).reverse()


def stage_order(rounds: list[str]) -> list[str]:
    """Addresses of all stages of `rounds` but INPUTS, each after its dependencies.

    Independent stages are sorted by round, then by their order in dvc.yaml.
    """
    with open_repo() as repo:
        return _in_order(_index_and_graph(repo)[1], rounds)


def _in_order(graph: Any, rounds: list[str]) -> list[str]:
    import networkx

    listed = list(read_yaml(Path("dvc.yaml"), "correct it")["stages"])
    keys = {
        address: (["", *rounds].index(round_), listed.index(stage))  # `assets` has the round ``
        for address in graph
        for stage, round_ in [split_address(address)]
        if address != INPUTS and round_ in ("", *rounds)
    }
    return list(networkx.lexicographical_topological_sort(graph.subgraph(keys), keys.__getitem__))


def order_and_changes(rounds: list[str]) -> tuple[list[str], set[str]]:
    """The `stage_order` of these rounds, and those of the stages that are not up to date, or that
    depend on one that is not.

    A dependent stage may be skipped later: if the stage before it reproduces equal outputs, it has
    nothing to do.
    """
    graph, changed = graph_and_changes(rounds)
    addresses = _in_order(graph, rounds)
    return addresses, with_dependents(addresses, set(changed), graph)


def graph_and_changes(rounds: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """The graph of all stages, and what `dvc status` reports of those of some rounds, by address;
    without INPUTS.
    """
    by_address: dict[str, Any] = {}
    with open_repo() as repo, repo.lock:
        index, graph = _index_and_graph(repo)
        for stage in index.stages:
            if stage.addressing != INPUTS and split_address(stage.addressing)[1] in ("", *rounds):
                by_address |= stage.status(check_updates=True)
                if answers_are_gone(stage.addressing):
                    by_address.setdefault(stage.addressing, ["answers of a language model"])
    return graph, by_address


def with_dependents(addresses: list[str], changed: set[str], graph: Any) -> set[str]:
    """Those of `addresses` that are in `changed`, or that depend on one that is."""
    import networkx

    todo, graph = set(changed), graph.subgraph(addresses)  # ended rounds do not run
    for address in networkx.topological_sort(graph):
        if not todo.isdisjoint(graph.pred[address]):
            todo.add(address)
    return todo & set(addresses)


def up_to_date(address: str) -> bool:
    """Whether `dvc status` reports no change of a stage."""
    with open_repo() as repo, repo.lock:
        (stage,) = repo.stage.collect(address)
        return not stage.status(check_updates=True)


# By default glibc returns a freed tensor to the kernel, which then clears the pages of the next
# one: a fifth of the CPU time. These settings keep freed memory in the process.
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "trim_threshold": 4 << 30,
        "mmap_threshold": 4 << 30,
        "top_pad": 256 << 20,
    }.items()
)

SETTINGS = {
    "GLIBC_TUNABLES": MALLOC,
    # oneDNN keeps up to 1,024 compiled products by default, up to 1 MB each on a CPU with AMX, one
    # per shape; and batches differ in their number of tokens. A training step has about 30 shapes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


def command_environment() -> dict[str, str]:
    """The environment of child processes.

    `python` is this interpreter (or its stand-in, see fork_server), even if its virtual environment
    is not activated.
    """
    interpreters = (fork_server.python(), sys.executable)
    folders = [*(str(Path(path).parent) for path in interpreters), os.environ.get("PATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "DVC_NO_ANALYTICS": "true",
    }


def stage_environment() -> dict[str, str]:
    """The environment of a stage: `command_environment` with the settings of glibc and oneDNN."""
    return SETTINGS | command_environment()


def run(
    address: str,
    on_line: Callable[[str], None],
    around: AbstractContextManager[object] | None = None,
) -> Outcome:
    """Bring one stage up to date (flows/execution/repro.py).

    Args:
        address: DVC's name of the stage, e.g. `sft@r0`.
        on_line: is called with each line of the stage's output, as it is printed, and with lines
            about what DVC does if nothing was printed for QUIET_SECONDS; then from another thread.
        around: is entered while DVC runs or restores the stage, but not if the stage is unchanged.

    Returns:
        Whether the stage ran, was restored from DVC's cache, or was unchanged.

    Raises:
        GateFailed: the stage is a gate that failed; the message lists its failed checks.
        Unreachable: the network or a remote server is not available; a retry may succeed.
        StorageFailed: the disk is full, read-only or failing.
        OutOfMemory: the memory of the GPU or of the machine did not suffice.
        BadInput: the stage reported invalid params or data.
        RondoError: any other failure, with the last lines of the output.

    Example:
        >>> run("sft@r0", print)
        <Outcome.ran: 'ran'>
    """
    with reporting(address, on_line, QUIET_SECONDS) as reporter, progress(DVC_COMPARES) as step:
        with open_repo() as repo, repo.lock:
            (stage,) = repo.stage.collect(address)
            remove_temporaries(stage)
            if not (stage.status(check_updates=True) or answers_are_gone(address)):
                return Outcome.unchanged
            repair_run_cache(repo)
        stage_lines: deque[str] = deque(maxlen=ERROR_LINES)
        dvc_lines: list[str] = []

        def sort_line(line: str) -> None:
            if DVC_NOISE.match(line):
                dvc_lines.append(line)
                if line.startswith(RUNNING):
                    step.what = STAGE_STARTS
            elif line:
                # a stage prints how far it is, so that only DVC is silent
                step.what = DVC_STORES
                stage_lines.append(line)
                on_line(line)
                reporter.printed()

        with around or nullcontext():
            code = stream(["flows.execution.repro", address], sort_line)
        if code:
            raise _failure(address, code, "\n".join(stage_lines))
        clear_resume_states(address)
        cached = any("is cached" in line for line in dvc_lines)
        return Outcome.restored if cached else Outcome.ran


# What killed processes leave: entries in DVC's lists, files and folders that are not finished, and
# states to resume from.


def running_commands() -> list[str]:
    """The DVC commands that run in this folder."""
    try:
        written, lists = RWLOCK.stat().st_mtime, json.loads(RWLOCK.read_text("utf-8"))
    except (FileNotFoundError, ValueError):  # nothing has run yet, or it was written in part
        return []
    readers = [reader for of_path in lists.get("read", {}).values() for reader in of_path]
    holders = [*lists.get("write", {}).values(), *readers]
    return [holder["cmd"] for holder in holders if _runs(holder["pid"], written)]


def _runs(pid: int, written: float) -> bool:
    """Whether the process that was in a list when it was `written` still runs.

    DVC takes any process with this number for it. After the restart of a container, that may be
    another one, which began later.
    """
    try:
        return psutil.Process(pid).create_time() <= written + CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False


def remove_stale_rwlock(repo: Any) -> None:
    """Delete DVC's list of the paths in use if none of its commands runs, or it cannot be read.

    A DVC that is killed while it writes the list leaves an empty file, and all later commands fail.
    """
    from dvc.lock import make_lock
    from dvc.rwlock import RWLOCK_LOCK

    hardlink = repo.config["core"].get("hardlink_lock", False)
    path = str(RWLOCK.with_name(RWLOCK_LOCK))
    with make_lock(path, tmp_dir=repo.tmp_dir, hardlink_lock=hardlink, wait=True):
        if not running_commands():
            RWLOCK.unlink(missing_ok=True)


def remove_temporaries(stage: Any) -> None:
    """Delete what a killed process of this stage, or of DVC, had not finished writing: files under
    the names that `replacing` and DVC give them until they are complete.

    Also of an unchanged stage, since `dvc repro` by hand removes none. Other commands write beside
    outputs, e.g. into reports/: their files stay.
    """
    name, round_ = split_address(stage.addressing)
    for folder in (stage_dir(round_, name), work_dir(round_, name)):
        for path in folder.rglob(".*.tmp"):
            if path.is_file():
                path.unlink()
    for output in (Path(out.fs_path) for out in stage.outs):
        remove_unfinished(output)
        for path in output.parent.glob(".*.tmp"):
            if DVC_TEMPORARY.fullmatch(path.name):
                path.unlink()


def repair_run_cache(repo: Any) -> None:
    """Remove empty folders from the run cache, where DVC finds the outputs of a stage by its
    command and inputs: `.dvc/cache/runs/KE/KEY/VALUE`. With one, every later `dvc repro` of its
    stage fails.
    """
    for folder in Path(repo.stage_cache.cache_dir).glob("*/*"):
        with suppress(OSError):  # it is gone, or no longer empty: clones may share a cache
            if not any(folder.iterdir()):
                time.sleep(WRITING_SECONDS)
                folder.rmdir()


def clear_resume_states(address: str) -> None:
    """Delete the states from which a killed stage resumes, after DVC has recorded its outputs.

    The stage cannot do this itself: if DVC fails to record the outputs, the stage must resume.
    """
    stage, round_ = split_address(address)
    for state in work_dir(round_, stage).glob(f"*/{RESUME_STATE}"):
        remove_state(state)


def remove_state(state: Path) -> None:
    """Delete a resume state with the rollouts and checkpoints beside it.

    It goes first: a stage would resume from it without the rest if this process is killed here.
    """
    state.unlink()
    shutil.rmtree(state.parent)


def stream(module: list[str], on_line: Callable[[str], None]) -> int:
    """Run `python -m MODULE ...` and return its exit code; no process outlives this call.

    `on_line` is called with each line of its output (stdout and stderr), as it is printed.
    """
    command = [fork_server.python(), "-m", *module]
    process = process_guard.start(
        command,
        env=stage_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        for line in map(str.rstrip, process.stdout):
            on_line(line)
        return process.wait()
    finally:  # also after Prefect's TerminationSignal and KeyboardInterrupt
        if process.poll() is None:
            process_guard.stop(process)
        process.stdout.close()


RUNNING = "Running stage '"
DVC_COMPARES, STAGE_STARTS = "DVC compares files with dvc.lock", "the stage starts"
DVC_STORES = "DVC hashes and stores the outputs"
# Lines of DVC itself. The log leaves them out: the flow reports the same in one line.
DVC_NOISE = re.compile(
    r"^$|Running stage '|Stage '.*' (is cached|didn't change)|> python |WARNING: '.*' is empty\.$"
)


# Errors whose message the stage has already printed; its exit code tells which one it was.
ERROR_BY_EXIT_CODE = {
    error.exit_code: error for error in (BadInput, Unreachable, StorageFailed, OutOfMemory)
}


def disk_advice(output: str) -> str | None:
    """The next step if a program that failed printed an error of the disk, or if the disk of the
    project is full: then it may also have failed on a file that it could not complete.
    """
    disk = os.statvfs(".")
    full = disk.f_bavail * disk.f_frsize < 1 << 16 or (disk.f_files > 0 and disk.f_favail == 0)
    return storage_advice(output) or (STORAGE_ADVICE[errno.ENOSPC] if full else None)


def _failure(address: str, code: int, message: str) -> RondoError:
    """The error of a stage that failed; `message`: the last lines that it printed."""
    stage, round_ = split_address(address)
    if code == GateFailed.exit_code:
        checks = gate_message(round_, stage.removeprefix("gate_"))
        return GateFailed(checks or f"{address}: {message}")
    if error := ERROR_BY_EXIT_CODE.get(code):
        # The stage's own line begins with address and error; they would be there twice.
        message = message.replace(f"{address}: {error.__name__}: ", "")
        return error(f"{address}: {message}")
    if advice := disk_advice(message):  # of DVC's own errors
        return StorageFailed(f"{address}: {message}. Next: {advice}")
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return OutOfMemory(
            f"{address} ended with exit code {code}: somebody killed it, or the system did so "
            f"because memory had run out. It printed last:\n{message}\n"
            f"Next step: if it was memory, {memory_advice(address)}"
        )
    return RondoError(
        f"{address} ended with exit code {code}:\n{message}\n"
        f"Next step: `dvc repro {address}` runs this stage alone."
    )
