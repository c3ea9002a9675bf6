"""Stages start in a tenth of a second instead of five: one process imports what all of them import, and forks for each.

`started` names in RONDO_PYTHON a stand-in for the interpreter, which hands `-m MODULE ...` to that process (flows/warm_client.py) with its
folder, environment and open files, passes signals on, and ends with the module's exit code. Only libraries are imported beforehand: the
project's own code is read anew each time. Anything else, any other system, and a server that is gone: the real interpreter.
"""

import atexit
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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

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
    "vaderSentiment.vaderSentiment",
    "dvc.cli",
    "dvc.commands.repro",
    "dvc.repo",
)


def python() -> str:
    """The interpreter to start modules with: the stand-in, where there is one."""
    return os.environ.get(VARIABLE, sys.executable)


@contextmanager
def started(environment: dict[str, str]) -> Iterator[None]:
    """Serve `python()` within; `environment` holds what a process reads as it starts, e.g. GLIBC_TUNABLES."""
    if sys.platform != "linux":  # elsewhere libraries that have been imported may not be forked
        yield
        return
    with TemporaryDirectory(prefix="rondo-") as folder:
        address, stand_in = f"{folder}/socket", Path(folder, "python")
        client = [sys.executable, "-IS", str(Path(__file__).with_name("warm_client.py")), address, sys.executable]
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        stand_in.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            command = [sys.executable, "-P", __file__, str(listener.fileno())]
            # its standard input ends when we do, however hard
            server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=os.environ | environment)
        real, os.environ[VARIABLE] = python(), str(stand_in)
        try:
            yield
        finally:
            os.environ[VARIABLE] = real
            server.kill()
            server.communicate()


def serve(listener: socket.socket) -> None:
    """Fork for each connection, until standard input ends."""
    gc.disable()  # nothing of what is imported will ever be garbage
    for name in LIBRARIES:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks: they tell their clients how they ended
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin, selectors.EVENT_READ)
        ready.register(listener, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in ready.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                ready.close()
                listener.close()
                become(connection)
            connection.close()


def become(connection: socket.socket) -> NoReturn:
    """Run the module that a client asks for, as if it had been started by it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.path.insert(0, request["folder"])  # as `-m` does
    gc.enable()
    threading.Thread(target=follow, args=(connection,), daemon=True).start()
    code = run(sys.argv[0])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(bytes([code]))
    os._exit(code)


def run(module: str) -> int:
    """The exit code of `python -m module`."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return (ended.code or 0) & 255
    except BaseException as error:
        traceback.print_exc()
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def follow(connection: socket.socket) -> None:
    """Signals that the client got are ours and our children's; where it is gone, so are we."""
    while number := connection.recv(1):
        os.killpg(0, number[0])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
