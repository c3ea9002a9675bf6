"""Git: the current user and commit, git commands, and options for a committer."""

import getpass
import subprocess

from stages.lib.core.errors import RondoError


def person(by: str | None) -> str:
    """Who decides: `by`, or else git's user."""
    return (by or "").strip() or current_user()


def current_user() -> str:
    """The user to record: git's user.name, or the account name if it is not set."""
    name = subprocess.run(
        ["git", "config", "user.name"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return name or getpass.getuser()


def revision() -> str:
    """The hash of HEAD, with `-dirty` if tracked files differ from it; `none` outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def git(*arguments: str) -> str:
    """Run a git command in the working directory, without hooks, and return its output, stripped.

    Raises:
        RondoError: git failed; the message contains its error output.
    """
    # Hooks are for people. After `dvc install`, for example, they run `dvc checkout`.
    command = ["git", "-c", "core.hooksPath=/dev/null", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RondoError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def committer_options() -> list[str]:
    """Options that set a committer for one git command; empty if git has a user.email."""
    email = subprocess.run(["git", "config", "user.email"], capture_output=True, check=False)
    if email.returncode == 0:
        return []
    return ["-c", "user.name=rondo", "-c", "user.email=rondo@localhost"]
