"""Entries of processes that have ended do not hold up DVC."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.execution import dvc_stages, rwlock
from stages.lib.core.files import write_text

COMMAND = "dvc repro --single-item prepare@r0"
DATA = "rounds/r0/prepare/data"


@pytest.fixture
def another() -> Iterator[int]:
    """The number of a process that has nothing to do with DVC."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def write(pid: int, other: int) -> dict[str, object]:
    """Write the list with an entry of both kinds."""
    locks = {
        "write": {DATA: {"pid": pid, "cmd": COMMAND}},
        "read": {"assets/data": [{"pid": pid, "cmd": COMMAND}, {"pid": other, "cmd": "dvc push"}]},
    }
    write_text(rwlock.RWLOCK, json.dumps(locks))
    return locks


def test_a_process_that_began_after_the_list_was_written_is_another_one(
    project: Path, another: int
) -> None:
    """E.g. after the restart of a container, where numbers begin at 1 again."""
    dvc_stages.run("assets", print)
    write(another, another)
    hour_ago = time.time() - 3600
    os.utime(rwlock.RWLOCK, (hour_ago, hour_ago))
    assert rwlock.running_commands() == []
    assert dvc_stages.run("prepare@r0", print) == dvc_stages.Outcome.ran


def test_entries_of_running_commands_stay(project: Path, another: int) -> None:
    locks = write(another, os.getpid())
    with dvc_stages.open_repo():
        assert json.loads(rwlock.RWLOCK.read_text()) == locks
    assert rwlock.running_commands() == [COMMAND, COMMAND, "dvc push"]
    with subprocess.Popen(["true"]) as ended:
        pass
    write(os.getpid(), ended.pid)
    with dvc_stages.open_repo():
        entry = {"pid": os.getpid(), "cmd": COMMAND}
        assert json.loads(rwlock.RWLOCK.read_text()) == {
            "write": {DATA: entry},
            "read": {"assets/data": [entry]},
        }
