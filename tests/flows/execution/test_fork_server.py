"""The real server and its stand-in: a module behaves as under the real interpreter, but starts
faster.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from flows.execution import fork_server
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="flows/execution/fork_server.py forks on Linux only"
)

PRINT = (
    "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('WORD'), "
    "bool({'torch', 'slow'} & {*sys.modules}), __name__)"
)
WAIT = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def python(forking_python: str) -> str:
    return forking_python


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes the module `job` and returns its folder."""

    def write(code: str) -> Path:
        (tmp_path / "job.py").write_text(code)
        return tmp_path

    return write


def run_job(python: str, folder: Path, *args: str, **options: Any) -> CompletedProcess[str]:
    """What `python -m job` in `folder` printed, and its exit code."""
    return subprocess.run(
        [python, "-m", "job", *args], cwd=folder, capture_output=True, text=True, **options
    )


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def waits(client: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Return when the client has connected, and handles signals, as it does before it waits for the
    server.
    """
    ready, handled = False, 1 << signal.SIGTERM - 1
    while not ready:
        assert client.poll() is None
        status = Path(f"/proc/{client.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        ready = bool(int(caught.split()[1], 16) & handled)
        time.sleep(0.01)


@pytest.fixture
def slow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A server of this test, ready as soon as the file `go` is there."""
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    (tmp_path / "slow.py").write_text(wait)
    monkeypatch.setattr(fork_server, "LIBRARIES", ("slow",))
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    before = set(psutil.Process().children())
    with fork_server.fork_server({"PYTHONPATH": str(tmp_path)}):
        [server] = set(psutil.Process().children()) - before
        yield server


def test_a_module_gets_arguments_folder_and_environment_and_is_read_again(python, job):
    folder = job(f"{PRINT}; sys.exit(7)")
    done = run_job(python, folder, "a", "b c", env={"WORD": "x"})
    assert (done.stdout, done.returncode) == (f"['a', 'b c'] {folder} x True __main__\n", 7)
    job("print('edited')")
    assert run_job(python, folder, check=True).stdout == "edited\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "last_line"),
    [
        ("", 0, []),
        ("import sys; sys.exit('no')", 1, ["no"]),
        ("1 / 0", 1, ["ZeroDivisionError: division by zero"]),
        ("import os; os.kill(os.getpid(), 9)", 137, []),
    ],
)
def test_it_ends_with_the_exit_code_and_errors_of_the_module(
    python, job, code, exit_code, last_line
):
    done = run_job(python, job(code))
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (exit_code, last_line)


def test_without_a_module_the_real_interpreter_runs(python):
    done = subprocess.run([python, "-c", PRINT, "a"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False __main__\n")


def test_a_signal_is_passed_on(python, job):
    with subprocess.Popen(
        [python, "-m", "job"], cwd=job(WAIT), stdout=subprocess.PIPE, text=True
    ) as client:
        child = int(client.stdout.readline())
        client.send_signal(signal.SIGTERM)
        assert client.wait(10) == 5 and gone(child)


def test_nothing_outlives_a_killed_client(python, job):
    code = WAIT.replace("print(child.pid", "import os; print(child.pid, os.getpid()")
    with subprocess.Popen(
        [python, "-m", "job"], cwd=job(code), stdout=subprocess.PIPE, text=True
    ) as client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        client.kill()
    assert all(gone(pid) for pid in pids)


def test_children_of_a_module_end_with_it(python, job):
    """A child that stayed would keep the output open, and its reader waiting."""
    code = (
        "import subprocess, os, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); {}"
    )
    for last_statement, exit_code in (("", 0), ("os.abort()", 134)):
        done = run_job(python, job(code.format(last_statement)), timeout=120)
        assert done.returncode == exit_code and gone(int(done.stdout))


def test_threads_and_exit_handlers_are_waited_for(python, job):
    code = (
        "import atexit, threading, time; atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )
    done = run_job(python, job(code), check=True)
    assert done.stdout == "thread\nlast\n"


def test_what_a_module_has_written_is_complete(python, job):
    """Also a file that it has not closed."""
    folder = job(
        "import sys; file = open('file', 'w'); file.write('all'); print('words')\n"
        "print('error', file=sys.stderr, end=''); sys.exit(3)"
    )
    done = run_job(python, folder)
    assert (done.stdout, done.stderr, done.returncode) == ("words\n", "error", 3)
    assert (folder / "file").read_text() == "all"


def test_a_signal_before_the_server_is_ready_is_not_lost(slow_server, tmp_path, job):
    with subprocess.Popen(
        [fork_server.python(), "-m", "job"], cwd=job("import time; time.sleep(60)")
    ) as client:
        waits(client)
        client.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert client.wait(60) == 128 + signal.SIGTERM


def test_if_the_server_dies_before_it_responds_the_real_interpreter_runs(slow_server, job):
    with subprocess.Popen(
        [fork_server.python(), "-m", "job"], cwd=job(PRINT), stdout=subprocess.PIPE, text=True
    ) as client:
        waits(client)
        slow_server.kill()
        assert "False __main__" in client.communicate(timeout=60)[0]


def test_a_client_that_dies_before_it_is_accepted_does_not_end_the_server(
    slow_server, tmp_path, job
):
    with subprocess.Popen([fork_server.python(), "-m", "job"], cwd=job("")) as client:
        waits(client)
        client.kill()
    (tmp_path / "go").touch()
    done = run_job(fork_server.python(), job(PRINT), check=True)
    assert "True __main__" in done.stdout


def test_modules_outlive_a_server_and_start_others_by_the_real_interpreter(
    slow_server, tmp_path, job
):
    start = "subprocess.run([os.environ['RONDO_PYTHON'], '-m', 'inner'], check=True, timeout=60)"
    folder = job(f"import os, subprocess; print('runs', flush=True); input(); {start}")
    (folder / "inner.py").write_text(PRINT)
    (tmp_path / "go").touch()
    command = [fork_server.python(), "-m", "job"]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout.readline() == "runs\n"
        slow_server.kill()
        slow_server.wait()
        assert "False __main__" in client.communicate("continue\n", timeout=60)[0]
        assert client.returncode == 0


def test_an_inner_block_uses_the_server_of_the_outer_one(slow_server):
    outer = fork_server.python()
    children = psutil.Process().children()
    with fork_server.fork_server({}):
        assert fork_server.python() == outer != sys.executable
        assert psutil.Process().children() == children
    assert fork_server.python() == outer


def test_if_no_socket_is_possible_the_real_interpreter_is_used(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    with fork_server.fork_server({}):
        assert fork_server.python() == sys.executable


def test_the_server_ends_if_a_library_has_opened_a_gpu(tmp_path):
    """So the real interpreter runs the modules: the GPU would be lost for forks."""
    gpu = str(tmp_path / "gpu0")
    code = (
        "import socket; from flows.execution import fork_server\n"
        f"fork_server.GPU_DEVICES = ({gpu!r},)\n"
        "fork_server.serve(socket.socketpair()[0], ['library'])"
    )
    (tmp_path / "library.py").write_text(f"opened = open({gpu!r}, 'w')\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE
    ) as server:
        assert server.wait(timeout=60) == 0  # its standard input is still open


def test_the_server_ends_with_the_process_that_started_it():
    code = (
        "import time, psutil; from flows.execution import fork_server\n"
        "fork_server.LIBRARIES = ()\n"
        "with fork_server.fork_server({}):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        server = int(owner.stdout.readline())
        owner.kill()
    assert gone(server)
