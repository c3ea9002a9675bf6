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
import selectors
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
    serves this block too.

    Args:
        environment: variables that a process reads only as it starts, e.g. GLIBC_TUNABLES. Forked
            processes share those of the server.
    """
    if VARIABLE in os.environ:
        yield
        return
    with TemporaryDirectory(prefix="rondo-") as folder:
        stand_in, server = Path(folder, "python"), start(Path(folder), environment)
        if not server:
            yield
            return
        os.environ[VARIABLE] = str(stand_in)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            server.kill()
            server.communicate()


def start(folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes] | None":
    """Start a server, with its stand-in `python` in `folder`.

    None if it is not possible: the path is too long for a socket, or `folder` does not allow
    programs to be executed.
    """
    # elsewhere some imported libraries do not survive a fork
    if sys.platform != "linux":
        return None
    address, stand_in = str(folder / "socket"), folder / "python"
    client = [
        sys.executable,
        "-IS",
        str(Path(__file__).with_name("fork_client.py")),
        address,
        sys.executable,
    ]
    stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    stand_in.chmod(0o755)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        # Raises OSError if `folder` is mounted noexec, so that no server starts in vain.
        subprocess.run([stand_in, "-c", ""], check=False, start_new_session=True)
        command = [sys.executable, "-P", __file__, str(listener.fileno())]
        # The server ends when its standard input closes, that is with this process, even if this
        # one is killed. Sessions of their own keep Ctrl-C away from both processes.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | environment,
            start_new_session=True,
        )
    return None


def serve(listener: socket.socket) -> None:
    """Fork for each connection and return the exit codes, until standard input closes.

    It ends at once if a library has opened a GPU as it was imported: that GPU is lost for forks.
    """
    gc.disable()  # imported objects are never garbage: collecting them only takes time
    for name in LIBRARIES:
        import_module(name)
    open_files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    if any(path.startswith(GPU_DEVICES) for path in open_files):
        return
    # of numpy, scipy and Arrow, which wait for work; Python 3.12 and later warn of them
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.freeze()
    # SIGCHLD writes to `wake`, so that `select` returns when a child has ended.
    child_ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    ready = selectors.DefaultSelector()
    for source in (sys.stdin, listener, child_ended):
        ready.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is child_ended:
                child_ended.recv(4096)
                for pid in [pid for pid in clients if has_ended(pid)]:
                    reap(pid, clients.pop(pid))
            else:
                connection, _ = listener.accept()
                try:
                    connection.send(b"\1")  # accepted
                except OSError:  # the client is gone already
                    connection.close()
                    continue
                if (pid := os.fork()) == 0:
                    # A fork that kept these open would keep other clients waiting after the server
                    # has ended.
                    for other in (listener, *clients.values()):
                        other.close()
                    run_request(connection)
                    return
                clients[pid] = connection


def has_ended(pid: int) -> bool:
    """Whether a child process has ended; it stays waitable."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap(pid: int, client: socket.socket) -> None:
    """End processes that a fork left behind, and send its exit code to the client."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError), client:  # the client may be gone
        client.send(bytes([code if code >= 0 else 128 - code]))


def run_request(connection: socket.socket) -> None:
    """Run the requested module with the client's arguments, files, folder and environment."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    serve(socket.socket(fileno=int(sys.argv[1])))
