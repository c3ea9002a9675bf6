"""The processes of `rondo up` and `rondo worker`, and their end."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import psutil
from filelock import FileLock, Timeout

from flows.core import interrupts
from flows.core.services import START_SECONDS, LogLine
from flows.execution import process_guard
from flows.execution.dvc_stages import command_environment, disk_advice
from stages.lib.core.errors import BadInput, RondoError, StorageFailed
from stages.lib.core.files import write_json

RUN_SECONDS = 3.0  # for a flow run to end its stage and report its state
MAX_RESTART_SECONDS = 60.0  # before a service that ended starts again
WORKER_QUERY_SECONDS = 2.0  # between two looks for runs to start, unless the user set others

Process = subprocess.Popen[str]


@dataclass
class Services:
    """The processes of `rondo up`, by name; each has a log <name>.log."""

    logs: Path
    environment: dict[str, str]
    processes: dict[str, Process] = field(default_factory=dict)
    commands: dict[str, tuple[str, ...]] = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)
    restart_times: dict[str, float] = field(default_factory=dict)  # of time.monotonic()

    def start(self, name: str, *command: str) -> None:
        """Start `python -m <command>`; the log of a service that starts again is kept."""
        again = name in self.commands
        self.commands[name] = command
        with self.log_file(name).open("a" if again else "w") as log:
            self.processes[name] = process_guard.start(
                [sys.executable, "-m", *command], env=self.environment, stdout=log, stderr=log
            )

    def run(self, name: str, *command: str) -> None:
        """Start a command and wait for its end.

        Raises:
            RondoError: it failed.
        """
        self.start(name, *command)
        try:
            failure = "failed" if self.processes[name].wait(START_SECONDS) else ""
        except subprocess.TimeoutExpired:
            failure = f"has not ended after {START_SECONDS:.0f} s"
        if failure:
            raise self.failure(name, f"prefect {name} {failure}")
        del self.processes[name]

    def wait_until(self, name: str, ready: Callable[[], bool]) -> None:
        """
        Raises:
            RondoError: the service is not ready in time, or any service ended.
        """
        end = time.monotonic() + START_SECONDS
        while not ready():
            self.check_alive()
            if time.monotonic() > end:
                raise self.failure(name, f"{name} does not answer after {START_SECONDS:.0f} s")
            time.sleep(0.2)

    def check_alive(self) -> None:
        """
        Raises:
            RondoError: a service ended.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise self.failure(name, f"{name} ended with {process.returncode}")

    def restart_ended(self, log: LogLine) -> None:
        """Start MLflow and the worker again if they ended; after each end, wait twice as long.

        Raises:
            RondoError: Prefect's server ended.
        """
        now = time.monotonic()
        for name, process in list(self.processes.items()):
            if process.poll() is None:
                continue
            if name == "prefect":
                self.check_alive()
            if name not in self.restart_times:
                wait = min(2.0 ** self.restarts[name], MAX_RESTART_SECONDS)
                self.restart_times[name] = now + wait
                log(f"{name} ended with {process.returncode}: it starts again in {wait:.0f} s")
            elif now >= self.restart_times[name]:
                del self.restart_times[name]
                self.restarts[name] += 1
                self.start(name, *self.commands[name])

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def failure(self, name: str, message: str) -> RondoError:
        """The error of a service, with the end of its log: it may be empty on a full disk."""
        log = self.log_file(name)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        if advice := disk_advice(tail):
            return StorageFailed(f"{message}, see {log}. Next: {advice}")
        return RondoError(f"{message}:\n{tail}")


def lock_folder(home: Path) -> FileLock:
    """The lock of the folder's servers and worker.

    Raises:
        BadInput: others run in this folder.
    """
    lock = FileLock(home / "up.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise BadInput(
            "`rondo up` or `rondo worker` already runs in this folder: use it, or stop it"
        ) from None
    return lock


def service_environment() -> dict[str, str]:
    """Of the processes."""
    return {
        # Prefect's 10 s delay the start of each run
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_SECONDS),
        **command_environment(),
        # prefect.yaml's working directory; an inherited PWD may name another folder
        "PWD": os.getcwd(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def stop_all(services: dict[str, Process], cut_off: Path, pool: str) -> None:
    """Stop the flow runs first, while the server can still record their states, then all services
    at once; within 10 s. The ids of the interrupted runs are written to `cut_off`.
    """
    interrupts.ignore_signals()
    if "worker" in services:
        from flows.orchestration import prefect_requests

        running: list[UUID] = []
        with suppress(RondoError):  # the server may be the service that ended
            running = prefect_requests.running(pool)
            write_json(cut_off, list(map(str, running)))
            # Before their processes end: after that the worker reports them as crashed
            prefect_requests.cut_off(running)
        # Not reached by the worker's end: each leads a session of its own
        processes = [
            process
            for worker in _children(services["worker"].pid)
            for process in _children(worker.pid)
        ]
        for process in processes:
            process.terminate()
        for process in psutil.wait_procs(processes, RUN_SECONDS)[1]:
            process.kill()
        with suppress(RondoError):
            prefect_requests.cut_off_crashed(running)
    for service in services.values():
        service.terminate()
    for service in services.values():
        process_guard.stop(service)
