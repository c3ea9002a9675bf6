"""Run a module of the project in a new process, so that it sees only the files on disk."""

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from stages.lib.core.errors import RondoError
from stages.lib.core.launch import environment_alone
from stages.lib.core.progress import PROGRESS, print_line, progress

SHOWN, SHOWN_LINES = 500, 20  # of its standard error, in the message of an error: characters, lines


def run_in_fresh_process(module: str, *arguments: str | Path, failing: str) -> Any:
    """Run `python -m module arguments...` and parse the last line of its output as JSON.

    Lines of progress, which it prints to its standard error, are printed here at once.

    Args:
        module: name of the module, e.g. `stages.reward.saving`.
        arguments: its command-line arguments.
        failing: start of the error message: what a failure of this process means.

    Raises:
        RondoError: the process failed. The message ends with the end of its standard error.
    """
    # RONDO_PYTHON is set inside a flow: a launcher that forks from a process with the slow imports
    # done (flows/execution/fork_server.py).
    python = os.environ.get("RONDO_PYTHON", sys.executable)
    command, errors = [python, "-m", module, *map(str, arguments)], deque[str](maxlen=SHOWN_LINES)
    again = progress(f"{module} in a fresh process")
    with again, TemporaryFile("w+", encoding="utf-8") as output:
        with subprocess.Popen(
            command,
            env=environment_alone(),
            stdout=output,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as process:
            assert process.stderr is not None
            for line in map(str.rstrip, process.stderr):
                if PROGRESS.match(line):
                    print_line(line)
                else:
                    errors.append(line)
        if process.returncode:
            shown = "\n".join(errors).strip()[-SHOWN:]
            raise RondoError(f"{failing}: {shown}")
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])
