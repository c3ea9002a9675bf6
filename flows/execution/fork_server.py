"""A server that imports the stages' libraries once and forks a process per stage.

A stage then starts in 0.1 s instead of 5 s. `fork_server` writes a stand-in for the Python
interpreter and puts its path into RONDO_PYTHON. The stand-in (flows/execution/fork_client.py) sends
`-m MODULE ...` to the server with its folder, environment and open files, passes signals on, and
ends with the module's exit code. Only libraries are imported beforehand; the project's own code is
read again by each process. Without `-m`, on other systems than Linux, and if the server is gone,
the real interpreter runs.
"""

import atexit
import gc
import io
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from typing import NoReturn

VARIABLE = "RONDO_PYTHON"
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")  # how the paths of NVIDIA's and AMD's begin
LIBRARIES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "peft",
    "datasets",
    "trl.trainer.sft_trainer",
    "trl.trainer.reward_trainer",
    "scipy.stats",
    "datasketch",
    "sklearn.feature_extraction.text",
    "sklearn.linear_model",
    "py3langid.langid",
    "jinja2",
    "vaderSentiment.vaderSentiment",
    "dvc.cli.parser",
    "dvc.data_cloud",
    "dvc.lock",
    "dvc.repo.plots",
    "dvc.repo.stage",
    "dvc.utils.strictyaml",
    "networkx",
    "openai",
    "requests",
    "tabulate",  # by torch, as a process ends
)


def python() -> str:
    """The interpreter to start modules with: the stand-in if there is one, else this one."""
    return os.environ.get(VARIABLE, sys.executable)


@contextmanager
def fork_server(environment: dict[str, str]) -> Iterator[None]:
    """Run a server within the block; `python()` returns its stand-in there. An outer block's server
    serves this block too. There is none if the path of temporary files is too long for a socket, or
    does not allow programs to be executed.

    Args:
        environment: variables that a process reads only as it starts, e.g. GLIBC_TUNABLES. Forked
            processes share those of the server.
    """
    # elsewhere some imported libraries do not survive a fork
    if VARIABLE in os.environ or sys.platform != "linux":
        yield
        return
    with TemporaryDirectory(prefix="rondo-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address, stand_in = f"{folder}/socket", Path(folder, "python")
        client = Path(__file__).with_name("fork_client.py")
        words = [sys.executable, "-IS", str(client), address, sys.executable]
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        stand_in.chmod(0o755)
        try:
            listener.bind(address)
            listener.listen()
            subprocess.run([stand_in, "-c", ""], check=False, start_new_session=True)
        except OSError:
            yield
            return
        # The server ends when its standard input closes, that is with this process, even if this
        # one is killed. Sessions of their own keep Ctrl-C away from both processes.
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), *LIBRARIES],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | environment,
            start_new_session=True,
        )
        listener.close()
        os.environ[VARIABLE] = str(stand_in)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)
            server.kill()
            server.communicate()


def serve(listener: socket.socket, libraries: list[str]) -> None:
    """Fork for each connection, until standard input closes.

    It ends at once if a library has opened a GPU as it was imported: that GPU is lost for forks.
    """
    gc.disable()  # imported objects are never garbage: collecting them only takes time
    for name in libraries:
        import_module(name)
    open_files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    if any(path.startswith(GPU_DEVICES) for path in open_files):
        return
    # of numpy, scipy and Arrow, which wait for work; Python 3.12 and later warn of them
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no ended fork stays
    while sys.stdin not in select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(connection)
        connection.close()


def attend(connection: socket.socket) -> None:
    """Run a client's module in a fork, end the processes that it leaves behind, and send its exit
    code to the client.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        connection.send(b"\1")  # accepted
    except OSError:  # the client is gone already
        os._exit(0)
    if (pid := os.fork()) == 0:
        run_request(connection)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its group exists as long as it is waitable
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):  # the client may be gone
        connection.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def run_request(connection: socket.socket) -> NoReturn:
    """Run the requested module with the client's arguments, files, folder and environment."""
    os.setsid()
    length, files, _, _ = socket.recv_fds(connection, 4, 3)
    request = json.loads(connection.recv(int.from_bytes(length), socket.MSG_WAITALL))
    for descriptor, file in enumerate(files):  # stdin, stdout, stderr
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.path.insert(0, request["folder"])  # as `-m` does
    gc.enable()
    threading.Thread(target=forward_signals, args=(connection,), daemon=True).start()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # a message, which the interpreter prints
        leave(end.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
    """End a fork as the interpreter would, but without taking all libraries apart: that copies the
    pages which it shares with the server, and takes 0.45 s. `multiprocessing` ends forks so too.
    """
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    for item in gc.get_objects():  # of the module: those of the server are frozen
        if issubclass(type(item), io.IOBase):
            with suppress(OSError, ValueError):  # is closed
                item.flush()
    os._exit(code)


def forward_signals(connection: socket.socket) -> None:
    """Send each signal of the client to this process group; end the group if the client is gone."""
    while number := connection.recv(1):
        os.killpg(0, number[0])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
