"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C; and where to find them."""

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
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from flows import guard
from flows.dag import command_environment
from stages.errors import BadInput, RondoError
from stages.records import write_json

HOST = "127.0.0.1"
PREFECT_PORT = int(os.environ.get("PREFECT_SERVER_API_PORT", "4200"))
MLFLOW_PORT = int(os.environ.get("MLFLOW_PORT", "5000"))
PREFECT_URL, MLFLOW_URL = f"http://{HOST}:{PREFECT_PORT}", f"http://{HOST}:{MLFLOW_PORT}"
MLFLOW_PAGES = f"{MLFLOW_URL}/#/experiments?workflowType=machine_learning"  # its pages for models; else it opens those for agents
POOL = "rondo"
START_SECONDS = 120.0
CUT_OFF = "cut_off.json"
NIGHTLY = "0 2 * * *"
RUN_SECONDS = 3.0  # for a flow run to end its stage and report

Process = subprocess.Popen[str]


def answers(url: str) -> bool:
    """Whether a GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def prefect_environment(home: Path) -> dict[str, str]:
    """What Prefect reads at import: its files in .rondo (made here), no analytics, no questions."""
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": f"{START_SECONDS:.0f}",  # a busy machine needs more than Prefect's 20
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",  # slots outlive a restart
    }


def serve(home: Path, say: Callable[[str], None] = print) -> None:
    """Start everything, print the addresses when they answer, wait for SIGINT or SIGTERM, end everything.

    Runs of the UI that end with it go on with the next call.

    Raises:
        BadInput: a port is in use.
        RondoError: one of the services ended, or did not answer in time; the end of its log is in the message.
    """
    for name, port in (("Prefect", PREFECT_PORT), ("MLflow", MLFLOW_PORT)):
        _check_port(name, port)
    logs = home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        **command_environment(),
        **prefect_environment(home),
        "PREFECT_API_URL": f"{PREFECT_URL}/api",
        "PWD": os.getcwd(),  # prefect.yaml's working directory; an inherited PWD may name another folder
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    services: dict[str, Process] = {}

    def begin(name: str, *command: str) -> None:
        with (logs / f"{name}.log").open("w") as log:
            services[name] = guard.start([sys.executable, "-m", *command], env=environment, stdout=log, stderr=log)

    def until(name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            _check_alive(services, logs)
            if time.monotonic() > end:
                raise RondoError(f"{name} does not answer after {START_SECONDS:.0f} s:\n{_tail(logs / f'{name}.log')}")
            time.sleep(0.2)

    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell ignores it for what it starts in the background
        signal.signal(number, _interrupt)
    try:
        begin("prefect", "prefect", "server", "start", "--host", HOST, "--port", str(PREFECT_PORT))
        store, artifacts = f"sqlite:///{home / 'mlflow.db'}", str(home / "mlartifacts")
        address = ("--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1")
        begin("mlflow", "mlflow", "server", "--backend-store-uri", store, "--artifacts-destination", artifacts, *address)
        say(f"starting Prefect and MLflow (logs in {logs}) ...")
        until("prefect", lambda: answers(f"{PREFECT_URL}/api/health"))
        for name, command in (("work-pool", ("create", POOL, "--type", "process", "--overwrite")), ("deploy", ("--all",))):
            begin(name, "prefect", name, *command)
            if services[name].wait(START_SECONDS):
                raise RondoError(f"prefect {name} failed:\n{_tail(logs / f'{name}.log')}")
            del services[name]
        _offer_nightly()
        for name in _take_up(home):
            say(f"goes on: {name}, which the last end has cut off")
        begin("worker", "prefect", "worker", "start", "--pool", POOL, "--type", "process")
        until("worker", _worker_online)
        until("mlflow", lambda: answers(f"{MLFLOW_URL}/health"))
        say(f"Prefect  {PREFECT_URL}/deployments   start a run there: rlhf-pipeline, next-round, sweep, evaluate-checkpoint")
        say(f"MLflow   {MLFLOW_PAGES}\nCtrl-C ends both.")
        while True:
            _check_alive(services, logs)
            time.sleep(0.5)
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
            raise BadInput(f"port {port} for {name} is in use: end what listens there (`make ui` twice?), or set {variable}") from None


def _check_alive(services: dict[str, Process], logs: Path) -> None:
    for name, process in services.items():
        if process.poll() is not None:
            raise RondoError(f"{name} ended with {process.returncode}:\n{_tail(logs / f'{name}.log')}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _ask(path: str, body: Any = None) -> Any:
    """What Prefect answers to a POST, or, without a body, to a GET; asked again while its database is busy."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{PREFECT_URL}/api/{path}", data, {"Content-Type": "application/json"})
    for seconds in (0.5, 1, 2, None):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or seconds is None:
                raise
            time.sleep(seconds)
    raise AssertionError("not reached")


def _worker_online() -> bool:
    try:
        return any(worker["status"] == "ONLINE" for worker in _ask(f"work_pools/{POOL}/workers/filter", {}))
    except urllib.error.URLError:
        return False


def _running() -> list[str]:
    """Ids of the runs that Prefect believes a worker to run."""
    chosen = {"deployment_id": {"is_null_": False}, "state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
    return [run["id"] for run in _ask("flow_runs/filter", {"flow_runs": chosen})]


def _offer_nightly() -> None:
    """A schedule of next-round that is off; whether it is on later is for the person who switches it."""
    deployment = _ask("deployments/name/next-round/next-round")
    if not deployment["schedules"]:
        _ask(f"deployments/{deployment['id']}/schedules", [{"schedule": {"cron": NIGHTLY, "timezone": "UTC"}, "active": False}])


def _take_up(home: Path) -> list[str]:
    """Schedule again what was running when `rondo up` ended, or died; returns the names. No worker is there yet, so none runs."""
    cut_off = home / CUT_OFF
    dead = _running()
    for run in dead:
        _ask(f"flow_runs/{run}/set_state", {"state": {"type": "CRASHED", "message": "its worker has gone"}})
    known = json.loads(cut_off.read_text()) if cut_off.exists() else []
    wanted = {"id": {"any_": [*known, *dead]}, "state": {"type": {"any_": ["CRASHED"]}}}  # some have come to their end meanwhile
    again = [run["id"] for run in _ask("flow_runs/filter", {"flow_runs": wanted})]
    for run in again:
        _ask(f"flow_runs/{run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}})
    cut_off.unlink(missing_ok=True)
    return again


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _stop_all(services: dict[str, Process], cut_off: Path) -> None:
    """Flow runs first, while the server still hears how they ended; then the rest at once. Within 10 s. cut_off: keeps their ids."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "worker" in services:
        with suppress(OSError):  # the server may be what has ended
            write_json(cut_off, _running())
        runs = [run for worker in _children(services["worker"].pid) for run in _children(worker.pid)]  # each leads a session of its own
        for run in runs:
            run.terminate()
        for run in psutil.wait_procs(runs, RUN_SECONDS)[1]:
            run.kill()
    for process in services.values():
        process.terminate()
    for process in services.values():
        guard.stop(process)
