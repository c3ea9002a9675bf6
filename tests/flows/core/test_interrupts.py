"""`rondo run` gets signals as terminals and service managers send them: to its process group."""

import fcntl
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from flows.execution import fork_server
from tests.paths import ROOT
from tests.servers import free_port, of_project, rondo, until

CTRL_C = b"\x03"
WAITS = "sft.max_steps=51"  # stage `sft` waits for the file `go`


class Terminal:
    """A terminal in which `rondo run` is the only command."""

    def __init__(self, project: Path, *arguments: str) -> None:
        self.output = ""
        self.master, terminal = pty.openpty()
        os.set_blocking(self.master, False)
        environment = {"PREFECT_SERVER_API_PORT": free_port(), "MLFLOW_TRACKING_URI": "off"}
        self.run = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", *arguments],
            cwd=project,
            env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches this session
        )
        os.close(terminal)

    def read(self) -> str:
        """All that was printed until now."""
        with suppress(OSError):  # nothing more is there, or the command has ended
            while printed := os.read(self.master, 65536):
                self.output += printed.decode()
        return self.output

    def press_ctrl_c(self) -> None:
        os.write(self.master, CTRL_C)

    def close(self) -> None:
        if self.master >= 0:
            os.close(self.master)
        self.master = -1


@pytest.fixture
def start_run(
    project: Path, copy_tables: Callable[[Path], None]
) -> Iterator[Callable[..., Terminal]]:
    copy_tables(project)
    terminals: list[Terminal] = []

    def start(*settings: str) -> Terminal:
        terminals.append(Terminal(project, *(f"--set={setting}" for setting in settings)))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()
        terminal.run.kill()
        terminal.run.wait()


def check_end(terminal: Terminal, number: signal.Signals, project: Path) -> None:
    """The run ends with the signal's exit code and one line, and leaves no process behind."""
    assert terminal.run.wait(60) == 128 + number, terminal.read()
    until(lambda: not of_project(project), 30)
    if terminal.master >= 0:
        [line] = [line for line in terminal.read().splitlines() if line.startswith("rondo:")]
        assert line.startswith(f"rondo: {number.name}: the run ends; ")
        assert line.endswith("`rondo run --set=sft.max_steps=51` continues")
        for word in ("Traceback", "Error", "Aborted", "failed"):
            assert word not in terminal.output


def states(project: Path) -> list[str]:
    """The states of all flow runs, as Prefect's database has them."""
    with closing(sqlite3.connect(project / ".rondo/prefect/prefect.db")) as database:
        return [state for (state,) in database.execute("select state_name from flow_run")]


def test_two_ctrl_c_end_a_run_and_a_closed_terminal_the_one_that_continues(
    project: Path, start_run: Callable[..., Terminal]
) -> None:
    """Each with a Prefect server of its own; the first one also has a fork server of its own."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(fork_server.VARIABLE)
        terminal = start_run(WAITS)
    until(lambda: "[sft@r0] step 3/3" in terminal.read())
    terminal.press_ctrl_c()
    until(lambda: "rondo: SIGINT" in terminal.read())
    terminal.press_ctrl_c()
    check_end(terminal, signal.SIGINT, project)
    assert states(project) == ["Crashed"]  # Prefect's server lived until this was recorded

    terminal = start_run(WAITS)
    until(lambda: "[sft@r0] step 3/3" in terminal.read())
    assert "[prepare@r0] unchanged" in terminal.output
    check_status(project)
    terminal.close()
    check_end(terminal, signal.SIGHUP, project)
    assert states(project) == ["Crashed", "Crashed"]


def check_status(project: Path) -> None:
    """What `rondo status` prints while `sft` runs."""
    status = rondo(project, "status")
    assert status.returncode == 0, status.stderr
    rows = [line.split(maxsplit=1) for line in status.stdout.splitlines() if " " in line.strip()]
    lines = dict(rows)
    assert (lines["prepare"], lines["gate_sft"], lines["evaluate"]) == ("done", "to do", "to do")
    assert lines["sft"] == "runs: step 3, loss 0.333"
    assert lines["r0:"] == "not finished: the sft gate was not reached"


def test_ctrl_c_ends_a_run_while_prefect_starts(
    project: Path, start_run: Callable[..., Terminal]
) -> None:
    terminal = start_run(WAITS)
    until(lambda: of_project(project, "flows.orchestration.prefect_server"))
    terminal.press_ctrl_c()
    check_end(terminal, signal.SIGINT, project)


CODE = """
import atexit, os, signal, time
from flows.core.interrupts import SIGNALS, Interrupted, exit_at_signals, raise_at_signals
def stop(number=signal.SIGTERM): os.killpg(0, number)
"""


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE + code]
    return subprocess.run(
        command, cwd=ROOT, start_new_session=True, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_exit_handlers_run_and_later_signals_do_nothing(
    number: signal.Signals,
) -> None:
    done = run_code(
        f"raise_at_signals('ends', 60)\natexit.register(print, 'last')\ntry: stop({number})\n"
        "except Interrupted:\n    for number in SIGNALS: stop(number)\n    print('handled')"
    )
    assert (done.returncode, done.stdout) == (128 + number, "handled\nlast\n")
    assert done.stderr == f"\nrondo: {number.name}: ends\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("raise_at_signals('ends', 0.1)\ntry: stop()\nexcept Interrupted: time.sleep(600)", 143),
        ("raise_at_signals('ends')\ntry: stop()\nexcept Interrupted: pass", 0),
    ],
    ids=["at the limit", "without a limit as the caller decides"],
)
def test_a_process_ends_after_a_signal(code: str, exit_code: int) -> None:
    assert run_code(code).returncode == exit_code


def test_a_signal_to_an_exit_handler_prints_nothing() -> None:
    done = run_code("raise_at_signals('ends', 60)\natexit.register(stop)\nexit_at_signals()")
    assert (done.returncode, done.stderr) == (143, "")


def test_nohup_is_respected() -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nraise_at_signals('ends', 60)\n"
    done = run_code(f"{ignored}stop(signal.SIGHUP)\nprint('continues')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "continues\n", "")
