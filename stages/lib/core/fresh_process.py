"""Run a module of the project in a new process, so that it sees only the files on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.lib.core.errors import RondoError


def run_in_fresh_process(module: str, *arguments: str | Path, failing: str) -> Any:
    """Run `python -m module arguments...` and parse the last line of its output as JSON.

    Args:
        module: name of the module, e.g. `stages.reward.rescore`.
        arguments: its command-line arguments.
        failing: start of the error message: what a failure of this process means.

    Raises:
        RondoError: the process failed. The message ends with the end of its standard error.
    """
    # RONDO_PYTHON is set inside a flow: a launcher that forks from a process with the slow imports
    # done (flows/execution/fork_server.py).
    python = os.environ.get("RONDO_PYTHON", sys.executable)
    process = subprocess.run(
        [python, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RondoError(f"{failing}: {process.stderr.strip()[-500:]}")
    return json.loads(process.stdout.splitlines()[-1])
