"""A module of the project in a process of its own, which knows nothing but what is on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.lib.core.errors import RondoError


def run_in_fresh_process(module: str, *arguments: str | Path, failing: str) -> Any:
    """Run `python -m module arguments...` and read the JSON of the last line that it prints.

    Raises:
        RondoError: it failed; `failing` says what that means, and the end of its standard error
            why.
    """
    python = os.environ.get(
        "RONDO_PYTHON", sys.executable
    )  # the flow's, which starts at once (flows/execution/fork_server.py)
    done = subprocess.run(
        [python, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RondoError(f"{failing}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])
