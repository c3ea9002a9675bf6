"""Stages start in a tenth of a second instead of five: one process imports what all of them import,
and forks for each.

`fork_server` names in RONDO_PYTHON a stand-in for the interpreter, which hands `-m MODULE ...` to that
process (flows/execution/fork_client.py) with its folder, environment and open files, passes signals
on, and ends with the module's exit code. Only libraries are imported beforehand: the project's own
code is read anew each time. Anything else, any other system, and a server that is gone: the real
interpreter.
"""

import gc
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE = "RONDO_PYTHON"
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
    "dvc.cli",
    "dvc.commands.repro",
    "dvc.repo",
)


def python() -> str:
    """The interpreter to start modules with: the stand-in, where there is one."""
    return os.environ.get(VARIABLE, sys.executable)


@contextmanager
def fork_server(environment: dict[str, str]) -> Iterator[None]:
    """Serve `python()` within; `environment` holds what a process reads as it starts, e.g.
    GLIBC_TUNABLES.
    """
    with TemporaryDirectory(prefix="rondo-") as folder:
        stand_in, server = Path(folder, "python"), start(Path(folder), environment)
        if not server:
            yield
            return
        outer, os.environ[VARIABLE] = os.environ.get(VARIABLE), str(stand_in)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if outer:
                os.environ[VARIABLE] = outer
            server.kill()
            server.communicate()


def start(folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes] | None":
    """The server, and its stand-in `python` in `folder`; None where that cannot be (too long a
    path, or nothing may be executed there).
    """
    if sys.platform != "linux":  # elsewhere libraries that have been imported may not be forked
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
        subprocess.run([stand_in, "-c", ""], check=False)
        command = [sys.executable, "-P", __file__, str(listener.fileno())]
        # its standard input ends when we do, however hard; Ctrl-C is for us
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | environment,
            start_new_session=True,
        )
    return None


def serve(listener: socket.socket) -> None:
    """Fork for each connection, and tell it how its fork ended; until standard input ends."""
    gc.disable()  # nothing of what is imported will ever be garbage
    for name in LIBRARIES:
        import_module(name)
    gc.freeze()
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    ready = selectors.DefaultSelector()
    for each in (sys.stdin, listener, ended):
        ready.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is ended:
                ended.recv(4096)
                for pid in [
                    pid
                    for pid in clients
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                ]:
                    reap(pid, clients.pop(pid))
            else:
                connection, _ = listener.accept()
                try:
                    connection.send(b"\1")
                except OSError:  # it has gone since it asked
                    connection.close()
                    continue
                if (pid := os.fork()) == 0:
                    for other in (
                        listener,
                        *clients.values(),
                    ):  # what we hold open would outlive the server
                        other.close()
                    run_request(connection)
                    return
                clients[pid] = connection


def reap(pid: int, client: socket.socket) -> None:
    """End what a fork has left behind, and tell its client the exit code."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError), client:  # it may be gone
        client.send(bytes([code if code >= 0 else 128 - code]))


def run_request(connection: socket.socket) -> None:
    """Run the module that a client asks for, as if it had been started by it."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(connection, 4, 3)
    request = json.loads(connection.recv(int.from_bytes(length), socket.MSG_WAITALL))
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.path.insert(0, request["folder"])  # as `-m` does
    gc.enable()
    threading.Thread(target=forward_signals, args=(connection,), daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def forward_signals(connection: socket.socket) -> None:
    """Signals that the client got are ours and our children's; where it is gone, so are we."""
    while number := connection.recv(1):
        os.killpg(0, number[0])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
