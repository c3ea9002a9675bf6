"""Runs of the terminal whose process was killed: no worker is there to tell Prefect, which would
believe them to run for ever.

A flow run holds a lock for as long as its process lives; the system takes it away however hard that
ends, and gives it to no other process.
"""

from pathlib import Path

from filelock import FileLock, Timeout

from flows.core.prefect_api import flow_runs, set_state

GONE = {"type": "CRASHED", "message": "its process has gone"}
_held: list[FileLock] = []


def hold_run_lock(path: Path) -> None:
    """The lock of the flow run that is recorded in `path`, until this process ends, however often
    it is asked for.

    To be called before there is a record.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"), is_singleton=True)
    lock.acquire()
    _held.append(lock)


def mark_crashed(runs: Path) -> None:
    """Let Prefect know of the runs that have a record in this folder, belong to no worker, and hold
    their lock no more.
    """
    for run in flow_runs(deployment_id={"is_null_": True}, state={"type": {"any_": ["RUNNING"]}}):
        if (runs / f"{run}.json").exists() and _free(runs / f"{run}.lock"):
            set_state(run, GONE)


def _free(path: Path) -> bool:
    try:
        with FileLock(path, blocking=False):
            return True
    except Timeout:
        return False
