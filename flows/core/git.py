"""Who says something that is kept: an approval, a badcase."""

import getpass
import subprocess

from stages.lib.core.errors import RondoError


def current_user() -> str:
    """git's user.name, else the account of this machine."""
    named = subprocess.run(
        ["git", "config", "user.name"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return named or getpass.getuser()


def revision() -> str:
    """The commit that is checked out, `-dirty` when files differ from it; `none` outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RondoError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _identity() -> list[str]:
    """Options that name a committer where git knows none."""
    known = (
        subprocess.run(["git", "config", "user.email"], capture_output=True, check=False).returncode
        == 0
    )
    return [] if known else ["-c", "user.name=rondo", "-c", "user.email=rondo@localhost"]
