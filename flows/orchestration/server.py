"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flows.core import interrupts
from flows.core.prefect_api import HOST, PREFECT_PORT, PREFECT_URL, flow_runs, request, set_state
from flows.core.services import MLFLOW_PAGES, MLFLOW_PORT, MLFLOW_URL, LogLine, is_up
from flows.execution import process_guard
from flows.execution.dvc_stages import command_environment
from flows.orchestration import crashed_runs, notifications
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import write_json

POOL = "rondo"
START_SECONDS = 120.0
CUT_OFF = "cut_off.json"  # ids of the runs that the end of `rondo up` interrupted
CUT_OFF_STATE = {"type": "CRASHED", "name": "CutOff", "message": "resumes with the next `rondo up`"}
NIGHTLY = "0 2 * * *"
RUN_SECONDS = 3.0  # for a flow run to end its stage and report its state
LOOK_SECONDS = 10.0  # between two looks for crashed runs
MAX_RESTART_SECONDS = 60.0  # before a service that ended starts again
TICK_SECONDS = 0.5  # between two checks whether the services are running

Process = subprocess.Popen[str]


def prefect_environment(home: Path) -> dict[str, str]:
    """The variables that Prefect reads at import: its files in .rondo (created here), no analytics,
    no prompts.
    """
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        # Prefect's 20 s are too short on a busy machine
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": f"{START_SECONDS:.0f}",
        "PREFECT_CLI_PROMPT": "false",
        # leases of concurrency slots survive a restart of the server
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
    }


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
        if self.processes[name].wait(START_SECONDS):
            raise RondoError(f"prefect {name} failed:\n{_tail(self.log_file(name))}")
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


def serve(home: Path, notify: str | None = None, log: LogLine = print) -> None:
    """Start Prefect, MLflow and a worker, print their addresses, and stop them at a signal
    (flows/core/interrupts.py).

    Runs of the Prefect UI that are interrupted by the end resume with the next call.

    Args:
        home: The .rondo folder, for databases and logs.
        notify: The address of a webhook (flows/orchestration/notifications.py).
        log: Called with each line of output.

    Raises:
        BadInput: a port is in use, or `notify` is not an address.
        RondoError: a service did not answer in time, or Prefect's server ended; the message
            contains the end of its log.
    """
    if notify is not None:
        notifications.check_webhook(notify)
    for name, port in (("Prefect", PREFECT_PORT), ("MLflow", MLFLOW_PORT)):
        _check_port(name, port)
    services = _Services(home / "logs", _service_environment(home))
    services.logs.mkdir(parents=True, exist_ok=True)
    try:
        _start_servers(services, home, log)
        _deploy(services)
        _offer_nightly()
        for name in notifications.set_up_notifications(notify):
            log(f"notifications: block `{notifications.BLOCK}` ({name})")
        for run in _reschedule_cut_off(home):
            log(f"resumes: {run}, which was interrupted when `rondo up` ended")
        _start_worker(services)
        services.wait_until("mlflow", lambda: is_up(f"{MLFLOW_URL}/health"))
        log(
            f"Prefect  {PREFECT_URL}/deployments   start a run there: "
            "rlhf-pipeline, next-round, sweep, evaluate-checkpoint"
        )
        log(f"MLflow   {MLFLOW_PAGES}\nCtrl-C ends both.")
        _watch(services, home, log)
    except interrupts.Interrupted:
        pass
    finally:
        _stop_all(services.processes, home / CUT_OFF)


def _service_environment(home: Path) -> dict[str, str]:
    return {
        **command_environment(),
        **prefect_environment(home),
        "PREFECT_API_URL": f"{PREFECT_URL}/api",
        # prefect.yaml's working directory; an inherited PWD may name another folder
        "PWD": os.getcwd(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def _start_servers(services: _Services, home: Path, log: LogLine) -> None:
    """Start both servers and wait for Prefect, which the next steps need."""
    prefect_address = ("--host", HOST, "--port", str(PREFECT_PORT))
    services.start(
        "prefect", "flows.orchestration.prefect_server", "server", "start", *prefect_address
    )
    mlflow_address = ("--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1")
    database = ("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}")
    artifacts = ("--artifacts-destination", str(home / "mlartifacts"))
    services.start("mlflow", "mlflow", "server", *database, *artifacts, *mlflow_address)
    log(f"starting Prefect and MLflow (logs in {services.logs}) ...")
    services.wait_until("prefect", lambda: is_up(f"{PREFECT_URL}/api/health"))


def _deploy(services: _Services) -> None:
    """Create the work pool and the deployments of prefect.yaml."""
    pool = ("create", POOL, "--type", "process", "--overwrite")
    services.run("work-pool", "prefect", "work-pool", *pool)
    services.run("deploy", "prefect", "deploy", "--all")


def _start_worker(services: _Services) -> None:
    options = ("--pool", POOL, "--type", "process")
    services.start("worker", "prefect", "worker", "start", *options)
    services.wait_until("worker", _worker_online)


def _watch(services: _Services, home: Path, log: LogLine) -> None:
    """Keep the services alive and look for crashed runs, until an interrupt.

    Raises:
        RondoError: Prefect's server ended.
    """
    for tick in itertools.count():
        services.restart_ended(log)
        if tick % (LOOK_SECONDS / TICK_SECONDS) == 0:
            with suppress(OSError):  # Prefect is busy: the next look finds them
                crashed_runs.mark_crashed(home / "runs")
        time.sleep(TICK_SECONDS)


def _check_port(name: str, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            variable = "PREFECT_SERVER_API_PORT" if name == "Prefect" else "MLFLOW_PORT"
            raise BadInput(
                f"port {port} for {name} is in use: stop the program that uses it "
                f"(is `make ui` already running?), or set {variable}"
            ) from None


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _worker_online() -> bool:
    try:
        return any(
            worker["status"] == "ONLINE"
            for worker in request(f"work_pools/{POOL}/workers/filter", {})
        )
    except urllib.error.URLError:
        return False


def _running() -> list[str]:
    """Ids of the runs of workers that have not ended, as far as Prefect knows."""
    return flow_runs(
        deployment_id={"is_null_": False}, state={"type": {"any_": ["PENDING", "RUNNING"]}}
    )


def _offer_nightly() -> None:
    """Add an inactive nightly schedule to next-round; an existing one stays as a person left it."""
    deployment = request("deployments/name/next-round/next-round")
    if not deployment["schedules"]:
        request(
            f"deployments/{deployment['id']}/schedules",
            [{"schedule": {"cron": NIGHTLY, "timezone": "UTC"}, "active": False}],
        )


def _reschedule_cut_off(home: Path) -> list[str]:
    """Schedule the runs again that were interrupted when `rondo up` ended or was killed.

    It is called before the worker starts: a run that Prefect shows as running has no process.

    Returns:
        Their ids.
    """
    cut_off = home / CUT_OFF
    dead = _running()
    for run in dead:
        set_state(run, CUT_OFF_STATE)
    recorded = json.loads(cut_off.read_text()) if cut_off.exists() else []
    # Only the crashed ones: others reached their end before `rondo up` did
    interrupted = flow_runs(id={"any_": [*recorded, *dead]}, state={"type": {"any_": ["CRASHED"]}})
    for run in interrupted:
        set_state(run, {"type": "SCHEDULED", "name": "AwaitingRetry"})
    cut_off.unlink(missing_ok=True)
    return interrupted


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
        running: list[str] = []
        with suppress(OSError):  # the server may be the service that ended
            running = _running()
            write_json(cut_off, running)
            # Before their processes end: after that the worker reports them as crashed
            for run in running:
                set_state(run, CUT_OFF_STATE)
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
        with suppress(OSError):
            # Some set this state themselves as they ended
            for run in flow_runs(id={"any_": running}, state={"name": {"any_": ["Crashed"]}}):
                set_state(run, CUT_OFF_STATE, force=True)
    for service in services.values():
        service.terminate()
    for service in services.values():
        process_guard.stop(service)
