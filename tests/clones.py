"""A clone of the project, as a user has it."""

import shutil
import subprocess
from pathlib import Path

from tests.paths import ROOT


def clone_of_working_tree(folder: Path) -> Path:
    """The tracked and new files of the working tree as a repository of their own."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if (ROOT / name).exists() and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for command in (
        ["init", "-q"],
        ["config", "user.name", "t"],
        ["config", "user.email", "t@localhost"],
        ["add", "-A"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    subprocess.run(["git", "commit", "-qm", "clone"], cwd=folder, check=True)
    return folder
