"""What a command of `rondo` prints in a terminal."""

import os
import pty
import subprocess
import sys

from tests.paths import ROOT

PROGRAM = "import sys; from flows.cli import main; main(sys.argv[1:])"


def printed_in_terminal(arguments: list[str], columns: int) -> list[str]:
    """The lines that `rondo` prints in the current folder, in a pseudo-terminal of this width.

    They have to fit into the terminal's buffer (4 KB).
    """
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    reader, writer = pty.openpty()
    try:
        subprocess.run(["stty", "cols", str(columns)], stdin=writer, check=True)
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=writer,
            check=True,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
        return os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
        os.close(writer)
