"""The guard leaves no process behind, whenever it is told to end."""

import functools
import signal
import subprocess
import time

import psutil

from flows.execution import process_guard
from tests.servers import until


def test_a_command_that_a_signal_ends_has_the_code_of_a_shell() -> None:
    command = ["sh", "-c", "kill -9 $$"]
    assert process_guard.start(command).wait(60) == 128 + signal.SIGKILL


def test_a_signal_while_the_command_starts_ends_it_too() -> None:
    """SIGTERM is sent to a guard before it has started the command."""
    for wait in (0.0, 0.05, 0.1, 0.2):
        guard = process_guard.start(["sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE)
        time.sleep(wait)
        guard.terminate()
        output, _ = guard.communicate(timeout=60)
        assert guard.returncode
        for command in map(int, output.split()):
            until(functools.partial(is_gone, command), 10)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)
