"""Who says something that is kept: an approval, a badcase."""

import getpass
import subprocess


def me() -> str:
    """git's user.name, else the account of this machine."""
    named = subprocess.run(
        ["git", "config", "user.name"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return named or getpass.getuser()
