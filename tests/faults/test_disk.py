"""Errors of the disk: at single changes of files, and of a real file system that is full, without
inodes, or read-only. The command ends with a typed error, and goes on when there is room.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from flows.orchestration.service_processes import Services
from stages.lib.core.errors import RondoError, StorageFailed
from tests.faults.conftest import Report
from tests.faults.lab import (
    Ended,
    Lab,
    Point,
    Trial,
    copy,
    differences,
    hashes_of,
    run_trial,
    run_with,
)
from tests.faults.scale import FULL, sample
from tests.faults.servers import rondo_up
from tests.faults.test_kills import DVC_LOCK, STAGES
from tests.flows.test_up import with_the_flow

SMALL = "size=128m,nr_inodes=8192"
FEW = {
    "gate_sft@r0": [Point("stages.gate", "rename", "gates/r0/sft.ok", 1), DVC_LOCK],
}


def check_errors(trials: list[Trial]) -> None:
    """Each error has its type and its next step, and is no traceback."""
    for trial in trials:
        output = trial.first.output
        assert trial.first.code, trial
        assert "StorageFailed" in output and "run the same command again" in output, trial
        assert "Traceback" not in output, trial


def points_of(lab: Lab, address: str) -> list[Point]:
    """The first point of each kind that can fail: a file is made, synchronised, or renamed."""
    if not FULL:
        return FEW.get(address, [])
    first: dict[tuple[str, str], Point] = {}
    for point in lab.points(address):
        may_fail = point.operation in ("open", "append", "fsync", "rename")
        if may_fail and point.victim.startswith("stages."):
            first.setdefault((point.operation, point.path), point)
    return [*first.values(), DVC_LOCK]


@pytest.mark.parametrize("address", STAGES if FULL else FEW)
def test_one_error_of_the_disk(lab: Lab, address: str, report: Report) -> None:
    errors = ("ENOSPC", "EIO")
    trials = [
        run_trial(lab, address, point, errors[number % 2])
        for number, point in enumerate(
            sample(points_of(lab, address), 1 if FULL else 2), STAGES.index(address)
        )
    ]
    assert trials
    check_errors(trials)
    report("an error at one change of a file (ENOSPC, EIO)", trials, ("identical", "again"))


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
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


def take_inodes(disk: Path, free: int) -> Callable[[], None]:
    """Leave `free` inodes; returns a function that makes room."""
    folder = disk / "inodes"
    folder.mkdir()
    for number in range(os.statvfs(disk).f_ffree - free):
        (folder / str(number)).touch()
    return lambda: shutil.rmtree(folder)


def forbid_writing(disk: Path, _free: int) -> Callable[[], None]:
    """Returns a function that allows it again."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", disk], check=True) and None


@pytest.mark.parametrize(
    ("address", "take", "free"),
    [
        *(("sft@r0", fill, free) for free in (0, 40_000, 300_000)),
        *(("sft@r0", take_inodes, free) for free in (0, 12)),
        ("gate_sft@r0", forbid_writing, 0),
        *(("ppo@r0", fill, free) for free in (100_000, 400_000)),
    ][:: 1 if FULL else 4],
)
def test_a_real_disk_without_room(
    lab: Lab,
    address: str,
    take: Callable[[Path, int], Callable[[], None]],
    free: int,
    tmp_path: Path,
    report: Report,
) -> None:
    if address not in lab.addresses():
        pytest.skip("minutes: make test-faults")
    with small_disk(tmp_path / "disk", SMALL) as disk:
        project = copy(lab.before(address), disk / "project")
        make_room = take(disk, free)
        first = lab.run(project, address)
        make_room()
        second = lab.run(project, address)
        differ = differences(hashes_of(project), lab.results(address))
    fault = f"{take.__name__}, {free} left, {address}"
    trial = Trial(fault, first.code != 0, first, second, differ)
    check_errors([trial])
    report(f"a real file system: {take.__name__}", [trial], ("identical", "again"))


def test_a_service_that_ends_on_a_full_disk(tmp_path: Path) -> None:
    """Its log may be empty, so that the disk itself is looked at."""
    with small_disk(tmp_path / "disk", SMALL) as disk, chdir(disk):
        services = Services(disk, dict(os.environ))
        make_room = fill(disk, 0)
        with pytest.raises(StorageFailed, match=r"ends failed, see .*ends\.log\. Next: free disk"):
            services.run("ends", "no_such_module")
        make_room()
        with pytest.raises(RondoError, match=r"ends failed:\n.*No module named no_such_module"):
            services.run("ends", "no_such_module")


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
@pytest.mark.parametrize("free", [0, 40_000])
def test_rondo_up_on_a_full_disk(
    undisturbed: Path, tmp_path: Path, free: int, report: Report
) -> None:
    with small_disk(tmp_path / "disk", SMALL) as disk:
        project = copy(undisturbed / "before", disk / "project")
        environment = with_the_flow(project)
        make_room = fill(disk, free)
        command = [sys.executable, "-m", "flows.cli", "up"]
        first = run_with(command, project, os.environ | environment, None)
        make_room()
        with rondo_up(project, environment) as (_, ready):
            second = Ended(0, ready, "")
        differ = differences(hashes_of(project), hashes_of(undisturbed / "before"))
    trial = Trial(f"rondo up, {free} left", first.code != 0, first, second, differ)
    check_errors([trial])
    assert re.search("StorageFailed: .*/", first.output), trial  # a file
    report("a real file system: fill", [trial])
