"""Which runs are alive: a flow run holds a file lock while its process lives.

The operating system releases the lock whenever the process ends, even by SIGKILL.
"""

from pathlib import Path

from filelock import FileLock, Timeout

RUNS = "runs"  # in the .rondo folder: a lock and a record per flow run, named after its id
_held_locks: list[FileLock] = []


def hold_run_lock(path: Path) -> None:
    """Hold the lock of the flow run whose record is at `path` until this process ends.

    It may be called several times, the first time before the record is written: a record without a
    held lock is that of a run that has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"), is_singleton=True)
    lock.acquire()
    _held_locks.append(lock)  # a lock that is collected as garbage is released


def is_free(lock: Path) -> bool:
    """Whether no process holds the lock."""
    try:
        with FileLock(lock, blocking=False):
            return True
    except Timeout:
        return False


def is_alive(home: Path, run: str) -> bool:
    """Whether the process of a run lives.

    Args:
        home: The .rondo folder.
        run: Its name, `<time>-<start of the flow run's id>`; with `.N` for a point of a sweep.
    """
    return not all(map(is_free, locks_of(home, run)))


def locks_of(home: Path, run: str) -> list[Path]:
    """The locks of the flow run of a run: one, or none if it has no record any more."""
    start_of_id = run.partition(".")[0].rpartition("-")[2]
    return list((home / RUNS).glob(f"{start_of_id}*.lock"))
