"""Prefect in `rondo run`: the signals of a terminal reach neither its temporary server nor its
signal handler.

A terminal sends Ctrl-C to its whole process group. Prefect 3.8.8 starts its temporary server in
the group of the run: the server ended first, and the run tried for minutes to report its end to it.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from contextvars import copy_context
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

from prefect import flow_engine
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

from flows.execution import process_guard
from stages.lib.core.errors import RondoError

MAX_RESTART_SECONDS = 60.0  # before a server that ended starts again


class GuardedServer(SubprocessASGIServer):
    """Prefect's temporary server in a session of its own. It ends with this process, and starts
    again if it ends before: without it, Prefect's client would try for minutes at each request.

    Prefect keeps one server per process: where it needs one, it uses this one if there is one.
    """

    log: Path
    stopped: Event

    def start(self, timeout: int | None = None) -> None:
        if self.running:
            return
        self.stopped = Event()
        super().start(timeout)
        # Prefect's settings are in the context
        Thread(target=copy_context().run, args=[self._keep], daemon=True).start()

    def _keep(self) -> None:
        """Start the server again whenever it ends, on the same port and database."""
        for restarts in count():
            if process := self.server_process:
                process.wait()
            if self.stopped.wait(min(2.0**restarts, MAX_RESTART_SECONDS)):
                return
            self.server_process = self._run_uvicorn_command()

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        """The command and the variables are those of the method that this one replaces."""
        command = [sys.executable, "-m", "uvicorn", "--factory"]
        command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
        environment = {
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
        }
        with self.log.open("a") as log:
            return process_guard.start(command, env=environment, stdout=log, stderr=log)

    def stop(self) -> None:
        self.stopped.set()
        if self.server_process:
            process_guard.stop(self.server_process)
        super().stop()


def prepare(home: Path) -> None:
    """Leave SIGTERM to the handler that is set, and start a server unless Prefect knows one.

    Call it in the main thread: the server would end with another thread that started it.

    Args:
        home: The .rondo folder; the server's log is in its folder `logs`.

    Raises:
        RondoError: the server did not start.
    """
    engine: Any = flow_engine
    engine.capture_sigterm = nullcontext
    if get_current_settings().api.url:
        return
    server = GuardedServer()
    server.log = home / "logs" / "temporary-prefect.log"
    server.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        server.start()
    except RuntimeError as error:
        raise RondoError(f"{error} Its log: {server.log}") from None
