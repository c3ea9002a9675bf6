"""Prefect's worker: its pool, its deployments, the runs that it resumes.

`rondo up` has one beside its servers; `rondo worker` is one for the Prefect server of a team. A run
works in the clone of its worker, so each worker has a pool and deployments of its own.
"""

import hashlib
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.core.run_locks import RUNS
from flows.core.services import (
    API_URL,
    PUSH_TO,
    SERVERS,
    TRACKING_URI,
    WORKER,
    LogLine,
    prefect_environment,
    prefect_pages,
)
from flows.orchestration.service_processes import Services, services_until_signal
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.reading import read_yaml

LOOK_SECONDS = 5.0  # between two looks for services that ended and for crashed runs
DEPLOYMENTS = Path("prefect.yaml")
API_AUTH = "PREFECT_API_AUTH_STRING"


@dataclass(frozen=True)
class Worker:
    """name: "" for the worker of `rondo up`, else the end of the names of its deployments."""

    name: str = ""

    def folder_name(self, home: Path) -> str:
        """Of this folder on this machine, which may have others of the same name."""
        digest = hashlib.sha256(str(home).encode()).hexdigest()
        return f"{socket.gethostname()}-{digest[:8]}"

    def process_name(self, home: Path) -> str:
        """Of the worker of this process in Prefect, which shows an ended one for two minutes."""
        return f"{self.folder_name(home)}-{os.getpid()}"

    @property
    def pool(self) -> str:
        return self.named("rondo")

    def named(self, deployment: str) -> str:
        return f"{deployment}-{self.name}" if self.name else deployment


OWN = Worker()


def work(name: str, push_to: str | None, home: Path, log: LogLine = print) -> None:
    """`rondo worker`: run what people start at the team's Prefect server, until a signal.

    Args:
        name: of this machine in Prefect.
        push_to: the git remote to which isolated runs push their branch, after `dvc push`; None:
            they push nothing.
        home: the .rondo folder.
        log: called with each line of output.

    Raises:
        BadInput: PREFECT_API_URL is not set, or another machine has this name.
        Unreachable: the server does not answer, or refuses the string of PREFECT_API_AUTH_STRING.
        RondoError: the deployments or the worker failed; the message has the end of the log.
    """
    if API_URL not in os.environ:
        raise BadInput(
            f"set {API_URL} to the team's Prefect server, e.g. http://prefect.example.org:4200/api "
            f"(and {API_AUTH}, if it asks for a string); `rondo up` has a server of its own"
        )
    os.environ.update(prefect_environment(home))
    worker = Worker(name)
    os.environ[WORKER] = name
    if push_to:
        os.environ[PUSH_TO] = push_to
    if TRACKING_URI not in os.environ:
        log(f"{TRACKING_URI} is not set: MLflow's records stay in {home}")
    with services_until_signal(worker.pool, home) as services:
        (home / SERVERS).unlink(missing_ok=True)  # of an ended `rondo up`
        _check_name(worker, home)
        start_worker(services, worker, home, log)
        names = [worker.named(deployment["name"]) for deployment in _config()["deployments"]]
        log(
            f"worker {name} of {prefect_pages(home)}: start a run there at Deployments: "
            f"{', '.join(names)}\nCtrl-C ends it."
        )
        watch(services, home, log)


def _check_name(worker: Worker, home: Path) -> None:
    """
    Raises:
        BadInput: a worker of another folder or machine is online under this name. Its runs would be
            taken for those of this one.
        Unreachable: the server does not answer, or refuses the string.
    """
    from flows.orchestration import prefect_requests

    try:
        online = prefect_requests.online_workers(worker.pool)
    except RondoError as error:
        raise Unreachable(
            f"{error}: check {API_URL}, and that {API_AUTH} is the string of that server"
        ) from None
    own = worker.folder_name(home)
    if others := [name for name in online if not name.startswith(f"{own}-")]:
        raise BadInput(
            f"--name {worker.name}: {', '.join(sorted(others))} is online under this name: choose "
            "another one, or wait two minutes if that worker has ended"
        )


def start_worker(services: Services, worker: Worker, home: Path, log: LogLine) -> None:
    """Create the work pool and the deployments of prefect.yaml, schedule the interrupted runs, and
    start the worker.
    """
    from flows.orchestration import prefect_requests

    prefect_requests.create_pool(worker.pool)
    services.run("deploy", "prefect", "deploy", "--all", *_own_deployments(worker, home))
    prefect_requests.offer_nightly(worker.named("next-round"))
    for run in prefect_requests.resume(worker.pool):
        log(f"resumes: {run}, which was interrupted when its worker ended")
    name = worker.process_name(home)
    options = ("--pool", worker.pool, "--type", "process", "--name", name)
    services.start("worker", "prefect", "worker", "start", *options)
    services.wait_until("worker", lambda: _is_online(worker, name))


def _is_online(worker: Worker, name: str) -> bool:
    from flows.orchestration import prefect_requests

    with suppress(RondoError):
        return name in prefect_requests.online_workers(worker.pool)
    return False


def _own_deployments(worker: Worker, home: Path) -> list[str]:
    """Options of `prefect deploy`: a file with the deployments of prefect.yaml for this worker."""
    if not worker.name:
        return []
    config = _config()
    for deployment in config["deployments"]:
        deployment["name"] = worker.named(deployment["name"])
        deployment["work_pool"] = {"name": worker.pool}
    path = home / "worker.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML, too
    return ["--prefect-file", str(path)]


def _config() -> dict[str, Any]:
    """prefect.yaml."""
    config: dict[str, Any] = read_yaml(DEPLOYMENTS, "correct it")
    return config


def watch(services: Services, home: Path, log: LogLine) -> None:
    """Keep the services alive and look for crashed runs, until an interrupt.

    Raises:
        RondoError: Prefect's server ended, if it is among them.
    """
    from flows.orchestration import prefect_requests

    while True:
        services.restart_ended(log)
        with suppress(RondoError):  # Prefect is busy: the next look finds them
            prefect_requests.mark_crashed(home / RUNS)
        time.sleep(LOOK_SECONDS)
