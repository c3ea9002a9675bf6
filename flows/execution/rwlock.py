"""DVC's list of the paths that its running commands read and write, `.dvc/tmp/rwlock`.

DVC takes an entry for valid while any process has its number. After the restart of a container, or
of the machine, that may be another process.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from stages.lib.core.files import write_text

CLOCK_SECONDS = 10.0  # that the start of a process may differ, if the clock was set
RWLOCK = Path(".dvc/tmp/rwlock")
Holder = dict[str, Any]  # pid and cmd


def running_commands() -> list[str]:
    """The DVC commands that run in this folder."""
    try:
        written, locks = RWLOCK.stat().st_mtime, json.loads(RWLOCK.read_text())
    except (FileNotFoundError, ValueError):  # nothing has run yet, or DVC is writing the file
        return []
    return [holder["cmd"] for holder in _holders(locks) if _runs(holder, written)]


def repair(repo: Any) -> None:
    """Remove the entries of commands that have ended, and a list that cannot be read.

    A DVC that is killed while it writes the list leaves an empty file, and all later commands fail.

    Args:
        repo: the opened repository of the working directory.
    """
    from dvc.lock import make_lock
    from dvc.rwlock import RWLOCK_LOCK

    with make_lock(
        str(RWLOCK.with_name(RWLOCK_LOCK)),
        tmp_dir=repo.tmp_dir,
        hardlink_lock=repo.config["core"].get("hardlink_lock", False),
        wait=True,
    ):
        try:
            written, locks = RWLOCK.stat().st_mtime, json.loads(RWLOCK.read_text())
        except FileNotFoundError:
            return
        except json.JSONDecodeError:
            RWLOCK.unlink()
            return
        if all(_runs(holder, written) for holder in _holders(locks)):
            return
        write, read = locks.get("write", {}), locks.get("read", {})
        running = {
            "write": {path: holder for path, holder in write.items() if _runs(holder, written)},
            "read": {
                path: [holder for holder in holders if _runs(holder, written)]
                for path, holders in read.items()
            },
        }
        write_text(RWLOCK, json.dumps(running))


def _holders(locks: dict[str, Any]) -> Iterator[Holder]:
    yield from locks.get("write", {}).values()
    for holders in locks.get("read", {}).values():
        yield from holders


def _runs(holder: Holder, written: float) -> bool:
    """Whether the process that is in the list still runs.

    Args:
        written: when the list was written, in seconds since the epoch; its processes are older.
    """
    try:
        return psutil.Process(holder["pid"]).create_time() <= written + CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False
