"""A real file system that is full: the command ends with a typed error, and goes on when there is
room.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.projects import FULL, States, copy, differences, rondo, run

SIZE = "size=128m"


@contextmanager
def small_disk(folder: Path, options: str = SIZE) -> Iterator[Path]:
    """A file system in memory."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system needs root and the right to mount: {mounted.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, free: int) -> Callable[[], None]:
    """Leave `free` bytes; returns a function that makes room."""
    filler = disk / "filler"
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, shutil.disk_usage(disk).free - free)
    return filler.unlink


FREE = [("sft@r0", 300_000), ("sft@r0", 0), ("sft@r0", 40_000), ("gate_sft@r0", 0)]
FREE += [("ppo@r0", 100_000), ("ppo@r0", 400_000)]


@pytest.mark.parametrize(("address", "free"), FREE if FULL else FREE[:1])
def test_a_stage_on_a_full_disk(states: States, tmp_path: Path, address: str, free: int) -> None:
    state = states("tiny", address)
    with small_disk(tmp_path / "disk") as disk:
        project = copy(state.before, disk / "project")
        make_room = fill(disk, free)
        first = run(project, state.command)
        assert first.code == 5, first.output
        assert "StorageFailed" in first.output and "run the same command again" in first.output
        assert "Traceback" not in first.output, first.output
        make_room()
        again = run(project, state.command)
        assert again.code == 0, again.output
        assert not differences(project, state.after), again.output


@pytest.mark.skipif(not FULL, reason="a minute: make test-faults")
def test_rondo_up_on_a_full_disk(states: States, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        project = copy(states("small", "one round").before, disk / "project")
        fill(disk, 0)
        ended = run(project, rondo("up"))
        assert ended.code == 5 and re.search("StorageFailed: .*/", ended.output), ended.output
        assert "Traceback" not in ended.output, ended.output
