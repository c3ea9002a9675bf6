"""A workspace of its own for one run: a git worktree that shares DVC's cache and ends as the branch
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
MADE, ENDED = (
    Path(".rondo/made"),
    Path(".rondo/ended"),
)  # in a workspace: it is whole; its run has come to its end
KEPT_DAYS = 7
RECORDS = Path("records")  # in the branch: a folder a run, with its report and verdicts
COMMITTED = ("params.yaml", "dvc.lock", "rounds", "approvals", "badcases", str(RECORDS))
GIVEN = ("slices", "badcases", "approvals")  # what people have put there
CODE = ("dvc.yaml", "stages", "flows", "presets", "pyproject.toml", ".dvc/config")


@contextmanager
def working_tree(home: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Work where we are, when no other run does."""
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / "working-tree.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say("waits: another run works in this folder; with `isolated` each has its own")
        lock.acquire()
    try:
        yield Path.cwd()
    finally:
        lock.release()


@contextmanager
def workspace(run: str, home: Path) -> Iterator[Path]:
    """Work in `.rondo/workspaces/<run>`, a worktree of HEAD with today's params.yaml; commit its
    results to `runs/<run>` at the end.

    One that is there already goes on as it is. It is kept for a week at least after its end, and as
    long as it has not ended.

    Raises:
        BadInput: no git repository, no commit in it, or code that is not committed and would
            therefore not be in the branch.
    """
    folder = home / WORKSPACES / run
    if not (folder / MADE).exists():
        _check_committed()
        with FileLock(home / "workspaces.lock"):
            collect(home)
            _make(folder, f"runs/{run}")
    with chdir(folder):
        ENDED.unlink(missing_ok=True)
        yield folder
        if REPORTS.exists():
            shutil.copytree(REPORTS, RECORDS / run, dirs_exist_ok=True)
        git("add", "--", *(name for name in COMMITTED if Path(name).exists()))
        if git("diff", "--cached", "--name-only"):
            git(*committer_options(), "commit", "--quiet", "--no-verify", "-m", f"Run {run}")
        ENDED.touch()


def _make(folder: Path, branch: str) -> None:
    root = Path.cwd()
    with open_repo() as repo:
        cache = repo.cache.local_cache_dir
    if folder.exists():  # half made
        git("worktree", "remove", "--force", str(folder))
    git("worktree", "add", "--quiet", "-B", branch, str(folder), "HEAD")
    (folder / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {cache}\n")
    shutil.copy("params.yaml", folder)
    _share(JUDGE_CACHE, root, folder)
    for name in git(
        "ls-files", "--others", "--exclude-standard"
    ).splitlines():  # data and functions that params.yaml may name
        if Path(name).parts[0] not in (*COMMITTED, *GIVEN, *CODE):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(root / name)
    (folder / MADE).touch()


def collect(home: Path, days: float = KEPT_DAYS) -> list[str]:
    """Remove workspaces of runs that ended so many days ago; returns their names. Branches and
    DVC's cache keep what they made.
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
    """Answers of a judge that were paid for once are not paid for again."""
    (root / cache).mkdir(parents=True, exist_ok=True)
    (folder / cache.parent).mkdir(exist_ok=True)
    (folder / cache).symlink_to(root / cache)


def _check_committed() -> None:
    try:
        git("rev-parse", "--verify", "HEAD")
    except RondoError as error:
        raise BadInput(f"--isolated needs a git repository with a commit ({error})") from None
    names = [name for name in (*CODE, *GIVEN) if Path(name).exists()]
    changed = [
        line
        for line in git("status", "--porcelain", "--untracked-files=all", "--", *names).splitlines()
        if not empty(line)
    ]
    if changed:
        raise BadInput(
            "\n".join(
                [
                    "--isolated runs what is committed, and these are not: commit them first",
                    *changed,
                ]
            )
        )


def empty(status: str) -> bool:
    """Whether a line of git's is about a file with nothing in it, such as those that a new round
    brings along.
    """
    path = Path(status[3:])
    return status.startswith("??") and path.is_file() and not path.stat().st_size
