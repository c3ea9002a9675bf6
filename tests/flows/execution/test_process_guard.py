"""The guard leaves no process behind, whenever it is told to end."""

import signal
import subprocess
import sys

import psutil

from flows.execution import process_guard
from tests.paths import ROOT
from tests.servers import until

# SIGTERM arrives when the command has been started, before its Popen object has been assigned
AT_START = """
import os, signal, subprocess, sys
from flows.execution import process_guard

class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

process_guard.subprocess.Popen = Interrupted
sys.argv = ["guard", str(os.getppid()), "sleep", "60"]
sys.exit(process_guard.main())
"""


def test_a_command_that_a_signal_ends_has_the_code_of_a_shell() -> None:
    command = ["sh", "-c", "kill -9 $$"]
    assert process_guard.start(command).wait(60) == 128 + signal.SIGKILL


def test_a_signal_while_the_command_starts_ends_it_too() -> None:
    guard = subprocess.Popen(
        [sys.executable, "-c", AT_START],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output, _ = guard.communicate(timeout=60)
    command = int(output.split()[0])
    try:
        until(lambda: not psutil.pid_exists(command), 10)
    except AssertionError:
        psutil.Process(command).kill()
        raise
    assert guard.returncode != 0
