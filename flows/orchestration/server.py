"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import psutil
from filelock import FileLock, Timeout

from flows.core import interrupts
from flows.core.run_locks import RUNS
from flows.core.services import (
    HOST,
    MLFLOW_ARTIFACTS,
    MLFLOW_DATABASE,
    MLFLOW_PORT,
    PREFECT_PORT,
    START_SECONDS,
    WORKFLOW,
    LogLine,
    Servers,
    is_up,
    last_servers,
    new_auth,
    prefect_environment,
    server_environment,
    write_servers,
)
from flows.execution import process_guard
from flows.execution.dvc_stages import command_environment
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import write_json

NOTIFY_URL = "RONDO_NOTIFY_URL"
CUT_OFF = "cut_off.json"  # ids of the runs that the end of `rondo up` interrupted
RUN_SECONDS = 3.0  # for a flow run to end its stage and report its state
LOOK_SECONDS = 10.0  # between two looks for crashed runs
MAX_RESTART_SECONDS = 60.0  # before a service that ended starts again
WORKER_QUERY_SECONDS = 2.0  # between two looks for runs to start, unless the user set others
TICK_SECONDS = 0.5  # between two checks whether the services are running
MAX_PORT = 65535

Process = subprocess.Popen[str]


@dataclass
class _Services:
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
            raise RondoError(f"prefect {name} {failure}:\n{_tail(self.log_file(name))}")
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
                tail = _tail(self.log_file(name))
                raise RondoError(f"{name} does not answer after {START_SECONDS:.0f} s:\n{tail}")
            time.sleep(0.2)

    def check_alive(self) -> None:
        """
        Raises:
            RondoError: a service ended.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RondoError(
                    f"{name} ended with {process.returncode}:\n{_tail(self.log_file(name))}"
                )

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


def serve(home: Path, log: LogLine = print) -> None:
    """Start Prefect, MLflow and a worker, print their addresses, and stop them at a signal
    (flows/core/interrupts.py).

    Runs of the Prefect UI that are interrupted by the end resume with the next call. The address of
    a webhook for notifications is read from RONDO_NOTIFY_URL.

    Args:
        home: The .rondo folder, for databases and logs.
        log: Called with each line of output.

    Raises:
        BadInput: `rondo up` runs already in this folder, a port that the user set is in use, or
            RONDO_NOTIFY_URL is not an address.
        RondoError: a service did not answer in time, or Prefect's server ended; the message
            contains the end of its log.
    """
    # Popped: no stage needs it
    notify = os.environ.pop(NOTIFY_URL, None)
    if notify is not None:
        _check_webhook(notify)
    os.environ.update(prefect_environment(home))
    lock = FileLock(home / "up.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise BadInput("`rondo up` already runs in this folder: use it, or stop it") from None
    servers = _new_servers(home)
    own_pages = (f"http://{name}:{servers.prefect_port}" for name in (HOST, "localhost"))
    os.environ.update(server_environment(servers.auth, *own_pages))
    os.environ["PREFECT_API_URL"] = f"{servers.prefect}/api"
    services = _Services(home / "logs", _service_environment())
    services.logs.mkdir(parents=True, exist_ok=True)
    try:
        _start_servers(services, servers, home, log)
        _set_up_prefect(services, home, notify, log)
        services.wait_until("mlflow", lambda: is_up(f"{servers.mlflow}/health"))
        log(
            f"Prefect  {servers.prefect}/rondo#{servers.auth}\n"
            "         This link logs your browser in. Start a run at Deployments: rlhf-pipeline, "
            "next-round, sweep, evaluate-checkpoint\n"
            f"MLflow   {servers.mlflow}/#/experiments?{WORKFLOW}\nCtrl-C ends both."
        )
        _watch(services, home, log)
    except interrupts.Interrupted:
        pass
    finally:
        _stop_all(services.processes, home / CUT_OFF)


def _check_webhook(url: str) -> None:
    """
    Raises:
        BadInput: it is not an address of http or https.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise BadInput(
            f"{NOTIFY_URL}: expected an address that accepts a POST, http://... or https://..."
        )


def _new_servers(home: Path) -> Servers:
    """The servers of this process: with the string of the last ones, which browsers have stored,
    and on the same ports if they are free.
    """
    last = last_servers(home)
    prefect_port = _port("PREFECT_SERVER_API_PORT", last.prefect_port, PREFECT_PORT, 0)
    return Servers(
        prefect_port,
        _port("MLFLOW_PORT", last.mlflow_port, MLFLOW_PORT, prefect_port),
        last.auth or new_auth(),
        os.getpid(),
        psutil.Process().create_time(),
        str(home),
    )


def _port(variable: str, last: int, default: int, prefect_port: int) -> int:
    """The port that the user set, else the last one, else the first free one from the default.

    Args:
        prefect_port: Prefect's, which is not free; 0 if it is not known yet.

    Raises:
        BadInput: the port that the user set is no port, or is in use.
    """
    if variable in os.environ:
        text = os.environ[variable]
        if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
            raise BadInput(f"{variable}: expected a port, 1 to {MAX_PORT}, got {text!r}")
        if int(text) == prefect_port or not _is_free(int(text)):
            raise BadInput(
                f"{variable}: port {text} is in use: stop the program that uses it, or unset "
                f"{variable}, and `rondo up` chooses a free port"
            )
        return int(text)
    candidates = itertools.chain([last], range(default, MAX_PORT))
    return next(port for port in candidates if port != prefect_port and _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def _service_environment() -> dict[str, str]:
    return {
        # Prefect's 10 s delay the start of each run
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_SECONDS),
        **command_environment(),
        # prefect.yaml's working directory; an inherited PWD may name another folder
        "PWD": os.getcwd(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def _start_servers(services: _Services, servers: Servers, home: Path, log: LogLine) -> None:
    """Start both servers and wait for Prefect, which the next steps need."""
    prefect_address = ("--host", HOST, "--port", str(servers.prefect_port))
    services.start(
        "prefect", "flows.orchestration.prefect_server", "server", "start", *prefect_address
    )
    mlflow_address = ("--host", HOST, "--port", str(servers.mlflow_port), "--workers", "1")
    # No page of another host, not even one whose name resolves to this machine
    pages = ("--allowed-hosts", f"{HOST}:*,localhost:*", "--cors-allowed-origins", servers.mlflow)
    database = ("--backend-store-uri", f"sqlite:///{home / MLFLOW_DATABASE}")
    artifacts = ("--artifacts-destination", str(home / MLFLOW_ARTIFACTS))
    services.start("mlflow", "mlflow", "server", *database, *artifacts, *mlflow_address, *pages)
    write_servers(home, servers)
    log(f"starting Prefect and MLflow (logs in {services.logs}) ...")
    import flows.orchestration.prefect_requests  # noqa: F401 - takes 2 s, in which they start

    services.wait_until("prefect", lambda: is_up(f"{servers.prefect}/api/health"))


def _set_up_prefect(services: _Services, home: Path, notify: str | None, log: LogLine) -> None:
    """Create the work pool, the deployments of prefect.yaml and the notifications, schedule the
    interrupted runs, and start the worker.
    """
    from flows.orchestration import notifications, prefect_requests

    prefect_requests.create_pool()
    services.run("deploy", "prefect", "deploy", "--all")
    prefect_requests.offer_nightly()
    for name in notifications.set_up_notifications(notify):
        log(f"notifications: block `{notifications.BLOCK}` ({name})")
    recorded = home / CUT_OFF
    runs = json.loads(recorded.read_text()) if recorded.exists() else []
    for run in prefect_requests.reschedule(map(UUID, runs)):
        log(f"resumes: {run}, which was interrupted when `rondo up` ended")
    recorded.unlink(missing_ok=True)
    options = ("--pool", prefect_requests.POOL, "--type", "process")
    services.start("worker", "prefect", "worker", "start", *options)
    services.wait_until("worker", prefect_requests.worker_online)


def _watch(services: _Services, home: Path, log: LogLine) -> None:
    """Keep the services alive and look for crashed runs, until an interrupt.

    Raises:
        RondoError: Prefect's server ended.
    """
    from flows.orchestration import crashed_runs

    for tick in itertools.count():
        services.restart_ended(log)
        if tick % (LOOK_SECONDS / TICK_SECONDS) == 0:
            with suppress(RondoError):  # Prefect is busy: the next look finds them
                crashed_runs.mark_crashed(home / RUNS)
        time.sleep(TICK_SECONDS)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _stop_all(services: dict[str, Process], cut_off: Path) -> None:
    """Stop the flow runs first, while the server can still record their states, then all services
    at once; within 10 s. The ids of the interrupted runs are written to `cut_off`.
    """
    interrupts.ignore_signals()
    if "worker" in services:
        from flows.orchestration import prefect_requests

        running: list[UUID] = []
        with suppress(RondoError):  # the server may be the service that ended
            running = prefect_requests.running()
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
