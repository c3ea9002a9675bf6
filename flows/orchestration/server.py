"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C; and where to find
them.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from flows.core.prefect_api import HOST, PREFECT_PORT, PREFECT_URL, ask, flow_runs, set_state
from flows.core.services import MLFLOW_PAGES, MLFLOW_PORT, MLFLOW_URL, is_up
from flows.execution import process_guard
from flows.execution.dvc_stages import command_environment
from flows.orchestration import crashed_runs, notifications
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import write_json

POOL = "rondo"
START_SECONDS = 120.0
CUT_OFF = "cut_off.json"
CUT_OFF_STATE = {"type": "CRASHED", "name": "CutOff", "message": "goes on with the next `rondo up`"}
NIGHTLY = "0 2 * * *"
RUN_SECONDS = 3.0  # for a flow run to end its stage and report
LOOK_SECONDS, TICK_SECONDS = (
    10.0,
    0.5,
)  # between looks for runs whose process has gone, for services that have ended

Process = subprocess.Popen[str]


def prefect_environment(home: Path) -> dict[str, str]:
    """What Prefect reads at import: its files in .rondo (made here), no analytics, no questions."""
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        # a busy machine needs more than Prefect's 20
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": f"{START_SECONDS:.0f}",
        "PREFECT_CLI_PROMPT": "false",
        # slots outlive a restart
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }


def serve(home: Path, notify: str | None = None, say: Callable[[str], None] = print) -> None:
    """Start everything, print the addresses when they answer, wait for SIGINT or SIGTERM, end
    everything.

    Runs of the UI that end with it go on with the next call. notify: the address of a webhook
    (flows/orchestration/notifications.py).

    Raises:
        BadInput: a port is in use, or `notify` is no address. RondoError: one of the services
            ended, or did not answer in time; the end of its log is in the message.
    """
    if notify is not None:
        notifications.check(notify)
    for name, port in (("Prefect", PREFECT_PORT), ("MLflow", MLFLOW_PORT)):
        _check_port(name, port)
    logs = home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        **command_environment(),
        **prefect_environment(home),
        "PREFECT_API_URL": f"{PREFECT_URL}/api",
        # prefect.yaml's working directory; an inherited PWD may name another folder
        "PWD": os.getcwd(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    services: dict[str, Process] = {}

    def begin(name: str, *command: str) -> None:
        with (logs / f"{name}.log").open("w") as log:
            services[name] = process_guard.start(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log
            )

    def until(name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            _check_alive(services, logs)
            if time.monotonic() > end:
                raise RondoError(
                    f"{name} does not answer after {START_SECONDS:.0f} s:\n{_tail(logs / f'{name}.log')}"
                )
            time.sleep(0.2)

    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # SIGINT too: a shell ignores it for what it starts in the background
        signal.signal(number, _interrupt)
    try:
        listen = ("--host", HOST, "--port", str(PREFECT_PORT))
        begin("prefect", "flows.orchestration.prefect_server", "server", "start", *listen)
        store, artifacts = f"sqlite:///{home / 'mlflow.db'}", str(home / "mlartifacts")
        address = ("--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1")
        begin(
            "mlflow",
            "mlflow",
            "server",
            "--backend-store-uri",
            store,
            "--artifacts-destination",
            artifacts,
            *address,
        )
        say(f"starting Prefect and MLflow (logs in {logs}) ...")
        until("prefect", lambda: is_up(f"{PREFECT_URL}/api/health"))
        for name, command in (
            ("work-pool", ("create", POOL, "--type", "process", "--overwrite")),
            ("deploy", ("--all",)),
        ):
            begin(name, "prefect", name, *command)
            if services[name].wait(START_SECONDS):
                raise RondoError(f"prefect {name} failed:\n{_tail(logs / f'{name}.log')}")
            del services[name]
        _offer_nightly()
        for name in notifications.tell(notify):
            say(f"notifies: block `{notifications.BLOCK}` ({name})")
        for name in _take_up(home):
            say(f"goes on: {name}, which the last end has cut off")
        begin("worker", "prefect", "worker", "start", "--pool", POOL, "--type", "process")
        until("worker", _worker_online)
        until("mlflow", lambda: is_up(f"{MLFLOW_URL}/health"))
        say(
            f"Prefect  {PREFECT_URL}/deployments   start a run there: rlhf-pipeline, next-round, sweep, evaluate-checkpoint"
        )
        say(f"MLflow   {MLFLOW_PAGES}\nCtrl-C ends both.")
        for tick in itertools.count():
            _check_alive(services, logs)
            if tick % (LOOK_SECONDS / TICK_SECONDS) == 0:
                with suppress(OSError):  # Prefect is busy: the next look will do
                    crashed_runs.mark_crashed(home / "runs")
            time.sleep(TICK_SECONDS)
    except KeyboardInterrupt:
        say("\nstopping ...")
    finally:
        _stop_all(services, home / CUT_OFF)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_port(name: str, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            variable = "PREFECT_SERVER_API_PORT" if name == "Prefect" else "MLFLOW_PORT"
            raise BadInput(
                f"port {port} for {name} is in use: end what listens there (`make ui` twice?), or set {variable}"
            ) from None


def _check_alive(services: dict[str, Process], logs: Path) -> None:
    for name, process in services.items():
        if process.poll() is not None:
            raise RondoError(
                f"{name} ended with {process.returncode}:\n{_tail(logs / f'{name}.log')}"
            )


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _worker_online() -> bool:
    try:
        return any(
            worker["status"] == "ONLINE" for worker in ask(f"work_pools/{POOL}/workers/filter", {})
        )
    except urllib.error.URLError:
        return False


def _running() -> list[str]:
    """Ids of the runs that Prefect believes a worker to run."""
    return flow_runs(
        deployment_id={"is_null_": False}, state={"type": {"any_": ["PENDING", "RUNNING"]}}
    )


def _offer_nightly() -> None:
    """A schedule of next-round that is off; whether it is on later is for the person who switches
    it.
    """
    deployment = ask("deployments/name/next-round/next-round")
    if not deployment["schedules"]:
        ask(
            f"deployments/{deployment['id']}/schedules",
            [{"schedule": {"cron": NIGHTLY, "timezone": "UTC"}, "active": False}],
        )


def _take_up(home: Path) -> list[str]:
    """Schedule again what was running when `rondo up` ended, or died; returns the names. No worker
    is there yet, so none runs.
    """
    cut_off = home / CUT_OFF
    dead = _running()
    for run in dead:
        set_state(run, CUT_OFF_STATE)
    known = json.loads(cut_off.read_text()) if cut_off.exists() else []
    again = flow_runs(
        id={"any_": [*known, *dead]}, state={"type": {"any_": ["CRASHED"]}}
    )  # some have come to their end meanwhile
    for run in again:
        set_state(run, {"type": "SCHEDULED", "name": "AwaitingRetry"})
    cut_off.unlink(missing_ok=True)
    return again


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _stop_all(services: dict[str, Process], cut_off: Path) -> None:
    """Flow runs first, while the server still hears how they ended; then the rest at once. Within
    10 s. cut_off: keeps their ids.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "worker" in services:
        going: list[str] = []
        with suppress(OSError):  # the server may be what has ended
            going = _running()
            write_json(cut_off, going)
            for run in (
                going
            ):  # before their processes end, for the worker reports a crash of those that have not
                set_state(run, CUT_OFF_STATE)
        processes = [
            process
            for worker in _children(services["worker"].pid)
            for process in _children(worker.pid)
        ]  # each leads a session
        for process in processes:
            process.terminate()
        for process in psutil.wait_procs(processes, RUN_SECONDS)[1]:
            process.kill()
        with suppress(OSError):
            for run in flow_runs(
                id={"any_": going}, state={"name": {"any_": ["Crashed"]}}
            ):  # which were their own last words
                set_state(run, CUT_OFF_STATE, force=True)
    for service in services.values():
        service.terminate()
    for service in services.values():
        process_guard.stop(service)
