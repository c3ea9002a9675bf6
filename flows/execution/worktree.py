"""Where a run works: the project's folder, or a git worktree of its own (`--isolated`).

A worktree shares DVC's cache with the project. Its results are committed to the branch
`runs/<run id>`.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from flows.core.git import committer_options, git
from flows.execution.dvc_stages import open_repo
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import JUDGE_CACHE, REPORTS

WORKSPACES = "workspaces"
# Marker files in a workspace: its files are complete; its run has ended.
COMPLETE, ENDED = Path(".rondo/made"), Path(".rondo/ended")
KEPT_DAYS = 7
RECORDS = Path("records")  # in the branch: one folder per run, with its report and verdicts
COMMITTED = ("params.yaml", "dvc.lock", "rounds", "approvals", "badcases", str(RECORDS))
USER_FILES = ("slices", "badcases", "approvals")
CODE = ("dvc.yaml", "stages", "flows", "presets", "pyproject.toml", ".dvc/config")


@contextmanager
def working_tree(home: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Use the current folder; wait first while another run uses it."""
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / "working-tree.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log("waiting: another run is using this folder; with `isolated` each run has its own")
        lock.acquire()
    try:
        yield Path.cwd()
    finally:
        lock.release()


@contextmanager
def workspace(run: str, home: Path) -> Iterator[Path]:
    """Work in `.rondo/workspaces/<run>`, and commit the results to `runs/<run>` at the end.

    The workspace is a worktree of HEAD with the current params.yaml. An existing workspace is used
    as it is, so that a run resumes there. It is kept until its run has ended, and at least a week
    longer.

    Raises:
        BadInput: there is no git repository or no commit, or code or user files are not committed
            and would be missing in the branch.
    """
    folder = home / WORKSPACES / run
    if not (folder / COMPLETE).exists():
        _check_committed()
        with FileLock(home / "workspaces.lock"):
            collect(home)
            _create(folder, f"runs/{run}")
    with chdir(folder):
        ENDED.unlink(missing_ok=True)
        yield folder
        if REPORTS.exists():
            shutil.copytree(REPORTS, RECORDS / run, dirs_exist_ok=True)
        git("add", "--", *(name for name in COMMITTED if Path(name).exists()))
        if git("diff", "--cached", "--name-only"):
            git(*committer_options(), "commit", "--quiet", "--no-verify", "-m", f"Run {run}")
        ENDED.touch()


def _create(folder: Path, branch: str) -> None:
    root = Path.cwd()
    with open_repo() as repo:
        cache = repo.cache.local_cache_dir
    if folder.exists():  # incomplete: its creation was interrupted
        git("worktree", "remove", "--force", str(folder))
    git("worktree", "add", "--quiet", "-B", branch, str(folder), "HEAD")
    (folder / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {cache}\n")
    shutil.copy("params.yaml", folder)
    _share(JUDGE_CACHE, root, folder)
    # params.yaml may name data and functions that are not tracked by git: link them.
    for name in git("ls-files", "--others", "--exclude-standard").splitlines():
        if Path(name).parts[0] not in (*COMMITTED, *USER_FILES, *CODE):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(root / name)
    (folder / COMPLETE).touch()


def collect(home: Path, days: float = KEPT_DAYS) -> list[str]:
    """Remove the workspaces of runs that ended more than `days` ago, and return their names.

    Their branches, and their results in DVC's cache, stay.
    """
    old = [
        mark.parents[1]
        for mark in (home / WORKSPACES).glob(f"*/{ENDED}")
        if mark.stat().st_mtime < time.time() - days * 24 * 3600
    ]
    for folder in old:
        git("worktree", "remove", "--force", str(folder))
    return [folder.name for folder in old]


def _share(cache: Path, root: Path, folder: Path) -> None:
    """Link the cache of judge answers, so that no answer is paid for twice."""
    (root / cache).mkdir(parents=True, exist_ok=True)
    (folder / cache.parent).mkdir(exist_ok=True)
    (folder / cache).symlink_to(root / cache)


def _check_committed() -> None:
    try:
        git("rev-parse", "--verify", "HEAD")
    except RondoError as error:
        raise BadInput(f"--isolated needs a git repository with a commit ({error})") from None
    names = [name for name in (*CODE, *USER_FILES) if Path(name).exists()]
    status = git("status", "--porcelain", "--untracked-files=all", "--", *names).splitlines()
    if changed := [line for line in status if not _is_empty_new_file(line)]:
        reason = "--isolated runs committed files only; these are not committed, commit them first:"
        raise BadInput("\n".join([reason, *changed]))


def _is_empty_new_file(status_line: str) -> bool:
    """Whether a line of `git status` names an empty untracked file, such as a new round's."""
    path = Path(status_line[3:])
    return status_line.startswith("??") and path.is_file() and not path.stat().st_size
