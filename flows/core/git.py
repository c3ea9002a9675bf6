"""Git: the current user and commit, git commands, and options for a committer."""

import getpass
import subprocess

from stages.lib.core.errors import BadInput, RondoError

# What a run writes to files that git tracks: settings, results, and decisions on its gates
RESULTS = ("params.yaml", "dvc.lock", "rounds", "approvals", "badcases", "labels", "records")


def person(by: str | None) -> str:
    """Who decides: `by`, else git's user.name, else the name of the account."""
    return (by or "").strip() or _run("config", "user.name").stdout.strip() or getpass.getuser()


def revision() -> str:
    """The hash of HEAD, with `-dirty` if tracked files other than RESULTS differ from it; `none`
    without a commit. The settings and results of a run are recorded with it.

    Raises:
        BadInput: git refuses this repository, since it belongs to another user.
    """
    done = _run("rev-parse", "--verify", "--quiet", "HEAD")
    if "safe.directory" in done.stderr:
        raise BadInput(done.stderr.strip())  # it has the next step
    if not (commit := done.stdout.strip()):
        return "none"
    others = [f":(exclude){name}" for name in RESULTS]
    differs = _run("diff", "--quiet", "HEAD", "--", ":(top)", *others).returncode
    return f"{commit}-dirty" if differs else commit


def git(*arguments: str) -> str:
    """Run a git command in the working directory, without hooks, and return its output, stripped.

    Raises:
        RondoError: git failed; the message contains its error output.
    """
    # Hooks are for people. After `dvc install`, for example, they run `dvc checkout`.
    done = _run("-c", "core.hooksPath=/dev/null", *arguments)
    if done.returncode:
        raise RondoError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def committer_options() -> list[str]:
    """Options that set a committer for one git command; empty if git has a user.email."""
    if _run("config", "user.email").returncode == 0:
        return []
    return ["-c", "user.name=rondo", "-c", "user.email=rondo@localhost"]


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """
    Raises:
        BadInput: git is not installed.
    """
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BadInput("the command `git` is missing. Next: install git") from None
