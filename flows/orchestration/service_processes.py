"""The processes of `rondo up` and `rondo worker`, and their end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from filelock import FileLock, Timeout

from flows.core import interrupts
from flows.core.services import LOCK, START_SECONDS, LogLine
from flows.execution import process_guard
from flows.execution.dvc_stages import command_environment, disk_advice
from stages.lib.core.errors import BadInput, RondoError, StorageFailed

END_SECONDS = 6.0  # for the stages to end after their runs
WORKER_QUERY_SECONDS = 2.0  # between two looks for runs to start, unless the user set others

Process = subprocess.Popen[str]


@dataclass
class Services:
    """Processes by name; each has a log <name>.log.

    variables: of their environment, besides those of this process.
    """

    logs: Path
    variables: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    commands: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> None:
        """Start `python -m <command>`; the log of a service that starts again is kept."""
        self.logs.mkdir(parents=True, exist_ok=True)
        again = name in self.commands
        self.commands[name] = command
        environment = service_environment() | self.variables
        with self.log_file(name).open("a" if again else "w") as log:
            self.processes[name] = process_guard.start(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log
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
            for ended, code in self.ended().items():
                raise self.failure(ended, f"{ended} ended with {code}")
            if time.monotonic() > end:
                raise self.failure(name, f"{name} does not answer after {START_SECONDS:.0f} s")
            time.sleep(0.2)

    def ended(self) -> dict[str, int]:
        """The exit codes of the services that have ended, by name."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def restart_ended(self, log: LogLine) -> None:
        """Start MLflow and the worker again if they ended.

        Raises:
            RondoError: Prefect's server ended.
        """
        for name, code in self.ended().items():
            if name == "prefect":
                raise self.failure(name, f"{name} ended with {code}")
            log(f"{name} ended with {code}: it starts again")
            self.start(name, *self.commands[name])

    def stop(self) -> None:
        for service in self.processes.values():
            service.terminate()
        for service in self.processes.values():
            process_guard.stop(service)

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def failure(self, name: str, message: str) -> RondoError:
        """The error of a service, with the end of its log: it may be empty on a full disk."""
        log = self.log_file(name)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        if advice := disk_advice(tail):
            return StorageFailed(f"{message}, see {log}. Next: {advice}")
        return RondoError(f"{message}:\n{tail}")


@contextmanager
def services_until_signal(pool: str, home: Path) -> Iterator[Services]:
    """The processes of `rondo up` or `rondo worker`, of which a folder has one.

    A signal ends the block, and the end of the block ends the runs of the worker and all processes.

    Args:
        pool: of the worker.

    Raises:
        BadInput: others run in this folder.
    """
    try:
        # `rondo run` may be looking whether it is held
        lock = FileLock(home / LOCK).acquire(timeout=1)
    except Timeout:
        raise BadInput(
            "`rondo up` or `rondo worker` already runs in this folder: use it, or stop it"
        ) from None
    # Prefect's workers share one folder in TMPDIR, which the first user of a machine owns
    with lock, TemporaryDirectory(prefix="rondo-", ignore_cleanup_errors=True) as temporary:
        services = Services(home / "logs", {"TMPDIR": temporary})
        try:
            yield services
        except interrupts.Interrupted:
            pass
        finally:
            interrupts.ignore_signals()
            if "worker" in services.processes:
                stop_runs(services.processes["worker"].pid, pool)
            services.stop()


def service_environment() -> dict[str, str]:
    """The variables of the processes: those of this one, and others."""
    return {
        # Prefect's 10 s delay the start of each run
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_SECONDS),
        **command_environment(),
        # prefect.yaml's working directory; an inherited PWD may name another folder
        "PWD": os.getcwd(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def stop_runs(guard: int, pool: str) -> None:
    """End the flow runs of a worker and their stages, before the server that records it.

    They are killed, as it may happen to them at any time. The worker is killed first: it would
    report them as crashed.

    Args:
        guard: the process that guards the worker.
        pool: of the worker.
    """
    from flows.orchestration import prefect_requests

    with suppress(psutil.NoSuchProcess):
        for worker in psutil.Process(guard).children():
            worker.suspend()  # it starts no further run
            runs, all_processes = worker.children(), worker.children(recursive=True)
            for process in [worker, *runs]:
                process.kill()
            # Each stage has a guard that ends it
            for process in psutil.wait_procs(all_processes, END_SECONDS)[1]:
                process.kill()
    with suppress(RondoError):  # the server may be the service that ended
        prefect_requests.cut_off(pool)
