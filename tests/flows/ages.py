"""The ages of files."""

import os
import time
from pathlib import Path

from flows.core.locks import LOCK
from flows.execution.worktree import COMPLETE, ENDED


def age(folder: Path, days: float) -> None:
    """Let the last use of a workspace, or of another folder or file, be some days ago."""
    then = time.time() - days * 24 * 3600
    for path in (folder, folder / COMPLETE, folder / ENDED, folder / LOCK):
        if path.exists():
            os.utime(path, (then, then))
