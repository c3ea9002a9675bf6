"""Where a run works: the project's folder, or a git worktree of its own (`--isolated`).

A worktree shares DVC's cache with the project. Its results are committed to the branch
`runs/<run id>`.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from flows.core.bookkeeping import bookkeeping
from flows.core.git import RESULTS, committer_options, git
from flows.core.locks import LOCK
from flows.core.run_locks import is_alive, is_free
from flows.core.services import HOME, PUSH_TO, SERVERS, LogLine
from flows.execution.dvc_stages import open_repo
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import JUDGE_CACHE, REPORTS, ROUNDS
from stages.lib.core.progress import progress

WORKSPACES = "workspaces"
WORKSPACES_LOCK, WORKING_TREE_LOCK = "workspaces.lock", "working-tree.lock"
# Marker files in a workspace: its files are complete; its run has ended.
COMPLETE, ENDED = Path(".rondo/made"), Path(".rondo/ended")
KEPT_DAYS = 7
RECORDS = Path("records")  # in the branch: one folder per run, with its report and verdicts
USER_FILES = ("slices", "badcases", "approvals")
MAX_COPIED_BYTES = 64 * 2**20  # larger files that are not committed are linked into a workspace
CODE = ("dvc.yaml", "stages", "flows", "presets", "pyproject.toml", ".dvc/config", ".dvcignore")


@contextmanager
def working_tree(home: Path, log: LogLine) -> Iterator[Path]:
    """Use the current folder; wait first while another run uses it."""
    home.mkdir(parents=True, exist_ok=True)
    if not is_free(home / WORKING_TREE_LOCK):
        log("waiting: another run is using this folder; with `isolated` each run has its own")
    with FileLock(home / WORKING_TREE_LOCK):
        yield Path.cwd()


@contextmanager
def workspace(run: str, home: Path, log: LogLine, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """Work in `.rondo/workspaces/<run>`, and commit the results to `runs/<run>` at the end.

    The workspace is a worktree of HEAD with the current params.yaml, and with the project's other
    files as they are now, committed or not. An existing workspace is used as it is, so that a run
    resumes there; if it was removed, its branch is. The results are committed however the block
    ends. The workspace is kept until its run has ended, and at least a week longer.

    Args:
        inputs: files and folders that params.yaml names: they are there even if git ignores them.

    Raises:
        BadInput: there is no git repository or no commit, or code or user files are not committed
            and would be missing in the branch.
    """
    folder, branch = home / WORKSPACES / run, f"runs/{run}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / WORKSPACES_LOCK):
        if not (folder / COMPLETE).exists():
            check_committed()
            with bookkeeping("removing old workspaces", log):
                for old in old_workspaces(home):
                    if (old / ENDED).exists():
                        collect(old)
            _create(folder, branch, log, inputs)
        (folder / ENDED).unlink(missing_ok=True)
    with chdir(folder):
        ended = False  # a run that waits for a decision or was interrupted has not
        try:
            yield folder
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            with bookkeeping(f"committing {folder} to the branch {branch}", log):
                _commit(run)
                if ended:
                    ENDED.touch()
            if ended and (remote := os.environ.get(PUSH_TO)):
                again = f"`cd {folder} && dvc push && git push {remote} {branch}` tries again"
                with bookkeeping(f"pushing {branch} to {remote} ({again})", log):
                    push(branch, remote, log)


def _commit(run: str) -> None:
    """Commit the results in the working directory, a worktree that only this run uses."""
    if REPORTS.exists():
        shutil.copytree(REPORTS, RECORDS / run, dirs_exist_ok=True)
    Path(git("rev-parse", "--git-path", "index.lock")).unlink(missing_ok=True)  # of a killed git
    git("add", "--", *(name for name in RESULTS if Path(name).exists()))
    if git("diff", "--cached", "--name-only"):
        # Nobody is here to type the password of a signing key.
        options = [*committer_options(), "-c", "commit.gpgsign=false"]
        git(*options, "commit", "--quiet", "-m", f"Run {run}")


def push(branch: str, remote: str, log: LogLine) -> None:
    """Push the results in the working directory: the files first, so that whoever gets the branch
    gets them as well.
    """
    with progress(f"pushing {branch} to {remote}"):
        with open_repo() as repo:
            files = repo.push()
        git("push", "--quiet", remote, branch)
    log(f"pushed {branch} to {remote}, and {files} files to DVC's remote")


def _create(folder: Path, branch: str, log: LogLine, inputs: Iterable[Path]) -> None:
    from dvc.config import Config

    root = Path.cwd()
    _remove(folder)  # its creation may have been interrupted
    if git("branch", "--list", branch):  # of a run whose workspace was removed
        git("worktree", "add", "--quiet", str(folder), branch)
    else:
        git("worktree", "add", "--quiet", "-b", branch, str(folder), "HEAD")
        shutil.copy("params.yaml", folder)
        _share_records(folder)
    with open_repo() as repo:
        cache = repo.cache.local_cache_dir
    if (own := Path(".dvc/config.local")).exists():  # e.g. the password of a remote
        shutil.copy(own, folder / own)
    with Config(str(folder / ".dvc"), validate=False).edit("local") as config:
        config["cache"]["dir"] = cache
    (root / JUDGE_CACHE).mkdir(parents=True, exist_ok=True)
    (folder / JUDGE_CACHE.parent).mkdir(exist_ok=True)
    (folder / JUDGE_CACHE).symlink_to(root / JUDGE_CACHE)  # so that no answer is paid for twice
    (folder / HOME / SERVERS).symlink_to(folder.parents[1] / SERVERS)  # for links to their pages
    modified = _other_files("diff", "--name-only", "--relative", "--no-renames", "-z", "HEAD")
    if modified:
        log(f"not committed, used as they are now: {', '.join(modified)}")
    for name in [*modified, *_other_files("ls-files", "--others", "--exclude-standard", "-z")]:
        (folder / name).unlink(missing_ok=True)
        if (root / name).exists():
            _bring(root / name, folder / name)
    for path in inputs:  # e.g. a model that git ignores, or data that DVC tracks
        if not path.is_absolute() and path.exists() and not (folder / path).exists():
            _bring(root / path, folder / path)
    (folder / COMPLETE).touch()


def _share_records(folder: Path) -> None:
    """Make the records of a worktree those of the project, committed or not: which rounds have
    ended, what DVC has recorded, and what its cache need not have: metrics and failed verdicts.
    """
    for path in (folder / ROUNDS).glob("*/params.yaml"):
        path.unlink()
    with open_repo() as repo, repo.lock:  # no other DVC writes dvc.lock meanwhile
        records = [*ROUNDS.glob("*/params.yaml"), *ROUNDS.glob("*/*/metrics.json")]
        for path in (LOCK, *records, *REPORTS.glob("*/gate_promote.json")):
            if path.exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, folder / path)


def _other_files(*command: str) -> list[str]:
    """The files that a git command lists, without results, code and the user's checked files."""
    names = filter(None, git(*command).split("\0"))
    return [name for name in names if Path(name).parts[0] not in (*RESULTS, *USER_FILES, *CODE)]


def _bring(source: Path, target: Path) -> None:
    """Copy a file, so that later edits do not reach the run; link large files and folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file() and source.stat().st_size <= MAX_COPIED_BYTES:
        shutil.copy2(source, target)
    else:
        target.symlink_to(source)


def _remove(folder: Path) -> None:
    """Remove a worktree, also one that git was still making or does not know any more."""
    for command in (["unlock", str(folder)], ["remove", "--force", str(folder)]):
        with suppress(RondoError):
            git("worktree", *command)
    shutil.rmtree(folder, ignore_errors=True)
    git("worktree", "prune")


def workspaces(home: Path) -> list[Path]:
    """The folders of all workspaces, by name."""
    return sorted((home / WORKSPACES).glob("*"))


def folder_of_run(run: str, home: Path) -> Path:
    """The workspace of a run that a person names: the code of any other folder must not run.

    Raises:
        BadInput: there is no such workspace.
    """
    folder = home / WORKSPACES / run
    if folder not in workspaces(home):
        raise BadInput(
            f"run {run}: {folder} is not a folder; `rondo status` lists the runs that have one"
        )
    return folder


def run_of_folder() -> str:
    """The isolated run whose workspace is the current folder; empty in the project's folder."""
    return Path.cwd().name if COMPLETE.exists() else ""


def project_home() -> Path:
    """The .rondo folder of the project, also in the workspace of a run."""
    return Path.cwd().parents[1] if run_of_folder() else HOME.resolve()


def old_workspaces(home: Path, days: float = KEPT_DAYS) -> list[Path]:
    """The workspaces that no run has used for more than `days`, by name."""
    latest = time.time() - days * 24 * 3600
    return [
        folder
        for folder in workspaces(home)
        if _last_use(folder) < latest and not is_alive(home, folder.name)
    ]


def _last_use(folder: Path) -> float:
    """When a run last began, completed a stage or ended there, in seconds since the epoch."""
    marks = [folder / path for path in (COMPLETE, ENDED, LOCK)]
    return max(path.stat().st_mtime for path in [folder, *marks] if path.exists())


def collect(folder: Path) -> None:
    """Remove a workspace. Its branch, and its results in DVC's cache, stay.

    A run that was killed has not committed its results: they are committed now.

    Raises:
        RondoError: they cannot be committed; the workspace stays.
    """
    if (folder / COMPLETE).exists():
        with chdir(folder):
            _commit(folder.name)
    _remove(folder)


def check_committed() -> None:
    """
    Raises:
        BadInput: there is no git repository or no commit, the project is a part of another one, a
            branch is in the way, or code or user files are not committed.
    """
    try:
        git("rev-parse", "--verify", "HEAD")
    except RondoError as error:
        raise BadInput(f"--isolated needs a git repository with a commit ({error})") from None
    show = ("--show-prefix", "--show-superproject-working-tree")
    if other := git("rev-parse", *show):
        raise BadInput(
            "--isolated needs a git repository of the project's own; it is a folder or a submodule "
            f"of another ({other}): switch `isolated` off, or run in a clone of the project alone"
        )
    if git("branch", "--list", "runs"):
        raise BadInput(
            "--isolated makes the branch runs/RUN, which git refuses beside the branch `runs`: "
            "rename that one, `git branch -m runs OTHER`"
        )
    names = [name for name in (*CODE, *USER_FILES) if Path(name).exists()]
    options = ["--porcelain", "-z", "--no-renames", "--untracked-files=all"]
    status = filter(None, git("status", *options, "--", *names).split("\0"))
    if changed := [line for line in status if not _is_empty_new_file(line)]:
        reason = "--isolated runs committed files only; these are not committed, commit them first:"
        raise BadInput("\n".join([reason, *changed]))


def _is_empty_new_file(status_line: str) -> bool:
    """Whether a line of `git status` names an empty untracked file, such as a new round's."""
    path = Path(status_line[3:])
    return status_line.startswith("??") and path.is_file() and not path.stat().st_size
