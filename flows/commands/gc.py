"""`rondo gc`: give disk back."""

import logging
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import time

from filelock import FileLock
from rich.filesize import decimal

from flows.core.run_locks import RUNS, is_alive, is_free
from flows.execution.dvc_stages import open_repo, remove_state
from flows.execution.worktree import (
    WORKING_TREE_LOCK,
    WORKSPACES_LOCK,
    collect,
    old_workspaces,
    workspaces,
)
from flows.report.run_record import folder_of, pages, read_all
from flows.tracking.mlflow_store import OFF, store_uri
from flows.tracking.mlflow_tracker import unsent
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import RESUME_STATE, WORK


def collect_garbage(home: Path, days: float, cache: bool) -> Iterator[str]:
    """Remove what no run needs any more, and yield a line for each kind of it.

    These are the workspaces of runs and the resume states of stages that nobody has used for
    `days`, and the report pages of runs that ended before. What a run has computed stays: in its
    branch and in DVC's cache; so do its record, and its report in MLflow.

    Args:
        home: The .rondo folder.
        cache: Also remove the files of DVC's cache that no branch, no tag, no workspace and no file
            of the working directory refers to, e.g. results of earlier settings.

    Raises:
        BadInput: `days` is negative or no number; with `cache`, a run is running, or MLflow lacks
            models that only the cache has.
    """
    if not days >= 0:
        raise BadInput(f"--older-than {days}: expected days, 0 or more")
    if cache:
        _check_cache_is_free(home)
    with FileLock(home / WORKSPACES_LOCK):
        for folder in old_workspaces(home, days):
            freed = freed_bytes([folder])
            try:
                collect(folder)
                yield f"{decimal(freed)}: {folder}; the branch runs/{folder.name} stays"
            except RondoError as error:
                yield f"{folder} stays, since its results cannot be committed: {error}"
    old_pages = [path for folder in _old_reports(home, days) for path in pages(folder).values()]
    freed = sum(path.stat().st_size for path in old_pages)
    for path in old_pages:
        path.unlink()
    yield f"{decimal(freed)}: {len(old_pages)} report pages of runs; MLflow keeps report.html"
    if is_free(home / WORKING_TREE_LOCK):
        states = [path for path in WORK.glob(f"*/*/*/{RESUME_STATE}") if _age(path) > days]
        freed = freed_bytes(path.parent for path in states)
        for path in states:
            remove_state(path)
        yield f"{decimal(freed)}: {len(states)} resume states of stages that were interrupted"
    else:
        yield "the resume states stay: a run is using this folder"
    if cache:
        number, freed = _collect_cache(home)
        yield f"{decimal(freed)}: {number} files of DVC's cache that nothing refers to"


def _old_reports(home: Path, days: float) -> list[Path]:
    """The folders with the report pages of the runs that ended more than `days` ago."""
    return [
        folder_of(home, record.run)
        for record in read_all(home)
        if time() - record.updated > days * 24 * 3600 and not is_alive(home, record.run)
    ]


def freed_bytes(folders: Iterable[Path]) -> int:
    """The bytes that are free once the folders are removed: not those of files that have another
    hard link elsewhere.
    """
    entries = [path.lstat() for folder in folders for path in folder.rglob("*")]
    files = [info for info in entries if stat.S_ISREG(info.st_mode)]
    links = Counter((info.st_dev, info.st_ino) for info in files)
    return sum(
        info.st_blocks * 512 // info.st_nlink
        for info in files
        if links[info.st_dev, info.st_ino] == info.st_nlink
    )


def _age(path: Path) -> float:
    """Days since the file was written."""
    return (time() - path.stat().st_mtime) / (24 * 3600)


def _check_cache_is_free(home: Path) -> None:
    if not all(map(is_free, (home / RUNS).glob("*.lock"))):
        raise BadInput("a run is running: its results are not recorded yet; wait for its end")
    lacking = unsent(home)
    if lacking and store_uri(home) != OFF:
        raise BadInput(
            f"MLflow lacks records or models of {len(lacking)} runs, whose files may be in DVC's "
            "cache only: `rondo sync` sends them"
        )


def _collect_cache(home: Path) -> tuple[int, int]:
    """Run `dvc gc`; returns how many files it removed, and their bytes."""
    logging.getLogger("dvc").setLevel(logging.ERROR)  # it warns of each stage that has not run
    with open_repo() as repo:
        folder = Path(repo.cache.local.path)
        before = {path: path.lstat() for path in folder.rglob("*") if path.is_file()}
        folders = list(map(str, workspaces(home)))
        repo.gc(workspace=True, all_branches=True, all_tags=True, repos=folders)
    removed = [info for path, info in before.items() if not path.exists()]
    return len(removed), sum(info.st_blocks * 512 for info in removed if info.st_nlink == 1)
