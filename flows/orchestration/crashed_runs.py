"""Marks runs of the terminal as crashed if their process was killed.

They have no worker that would report this, so Prefect would show them as running for ever. A flow
run holds a file lock while its process lives. The operating system releases the lock whenever the
process ends, even by SIGKILL. An automation on Prefect's heartbeats
(PREFECT_FLOWS_HEARTBEAT_FREQUENCY, at least 30 s) would need a minute or more, and this needs at
most ten seconds.
"""

from pathlib import Path

from filelock import FileLock, Timeout
from prefect.states import Crashed

from flows.orchestration.prefect_requests import flow_runs, set_state

MESSAGE = "its process ended without reporting a result"
_held_locks: list[FileLock] = []


def hold_run_lock(path: Path) -> None:
    """Hold the lock of the flow run whose record is at `path` until this process ends.

    It may be called several times, the first time before the record is written: `mark_crashed`
    takes a record without a held lock for a crashed run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"), is_singleton=True)
    lock.acquire()
    _held_locks.append(lock)  # a lock that is collected as garbage is released


def mark_crashed(runs: Path) -> None:
    """Set the state of crashed runs in Prefect: running, without a worker, with a record in this
    folder, and with a released lock.
    """
    for run in flow_runs(deployment_id={"is_null_": True}, state={"type": {"any_": ["RUNNING"]}}):
        if (runs / f"{run.id}.json").exists() and _is_free(runs / f"{run.id}.lock"):
            set_state(run.id, Crashed(message=MESSAGE))


def _is_free(path: Path) -> bool:
    try:
        with FileLock(path, blocking=False):
            return True
    except Timeout:
        return False
