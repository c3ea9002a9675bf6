"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C."""

import json
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

from pydantic import AnyHttpUrl, TypeAdapter, ValidationError

from flows.core.databases import check_database
from flows.core.services import (
    API_URL,
    ARTIFACTS,
    EXPERIMENT,
    HOST,
    MLFLOW_ARTIFACTS,
    MLFLOW_DATABASE,
    MLFLOW_PORT,
    PREFECT_DATABASE,
    PREFECT_PORT,
    START_SECONDS,
    LogLine,
    Port,
    Servers,
    experiment_page,
    is_up,
    last_servers,
    new_auth,
    prefect_environment,
    server_environment,
    sqlite_uri,
    write_servers,
)
from flows.orchestration.service_processes import Services, services_until_signal
from flows.orchestration.worker import OWN, start_worker, watch
from flows.report.run_pages import RUNS_PATH
from stages.lib.core.errors import BadInput

NOTIFY_URL = "RONDO_NOTIFY_URL"
WEBHOOK, PORT = TypeAdapter(AnyHttpUrl), TypeAdapter(Port)
PORTS_TO_TRY = 100


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
            RONDO_NOTIFY_URL is not an address, or a database is damaged.
        RondoError: a service did not answer in time, or Prefect's server ended; the message
            contains the end of its log.
    """
    # Popped: no stage needs it
    webhook = os.environ.pop(NOTIFY_URL, None)
    if webhook:
        _check_webhook(webhook)
    os.environ.update(prefect_environment(home))
    with services_until_signal(OWN.pool, home) as services:
        for name in (PREFECT_DATABASE, MLFLOW_DATABASE):
            check_database(home / name)
        servers = _new_servers(home)
        own_pages = (f"http://{name}:{servers.prefect_port}" for name in (HOST, "localhost"))
        os.environ.update(server_environment(servers.auth, *own_pages))
        os.environ[API_URL] = f"{servers.prefect}/api"
        write_servers(home, servers)
        _start_servers(services, servers, home, log)
        from flows.orchestration import notifications

        for block in notifications.set_up_notifications(webhook):
            log(f"notifications: block `{notifications.BLOCK}` ({block})")
        start_worker(services, OWN, home, log)
        services.wait_until("mlflow", lambda: is_up(f"{servers.mlflow}/health"))
        log(
            f"Prefect  {servers.login}\n"
            "         This link logs your browser in. Start a run at Deployments: rlhf-pipeline, "
            "next-round, sweep, evaluate-checkpoint\n"
            f"Runs     {servers.prefect}{RUNS_PATH}\n"
            f"MLflow   {experiment_page(servers.mlflow, _experiment(servers))}\nCtrl-C ends both."
        )
        watch(services, home, log)


def _experiment(servers: Servers) -> str:
    """The id of MLflow's experiment, which is created if there is none: runs are its pages."""
    api = f"{servers.mlflow}/api/2.0/mlflow/experiments"
    made = json.dumps({"name": EXPERIMENT, "artifact_location": ARTIFACTS}).encode()
    as_json = {"Content-Type": "application/json"}
    try:
        create = urllib.request.Request(f"{api}/create", made, as_json)
        with urllib.request.urlopen(create, timeout=START_SECONDS) as answer:
            return str(json.load(answer)["experiment_id"])
    except urllib.error.HTTPError:  # it exists
        by_name = f"{api}/get-by-name?experiment_name={EXPERIMENT}"
        with urllib.request.urlopen(by_name, timeout=START_SECONDS) as answer:
            return str(json.load(answer)["experiment"]["experiment_id"])


def _check_webhook(url: str) -> None:
    """
    Raises:
        BadInput: it is not an address of http or https.
    """
    try:
        WEBHOOK.validate_python(url)
    except ValidationError:
        raise BadInput(
            f"{NOTIFY_URL}: expected an address that accepts a POST, http://... or https://..."
        ) from None


def _new_servers(home: Path) -> Servers:
    """The servers of this process: with the string of the last ones, which browsers have stored."""
    prefect_port = _port("PREFECT_SERVER_API_PORT", PREFECT_PORT)
    mlflow_port = _port("MLFLOW_PORT", MLFLOW_PORT, prefect_port)
    return Servers(prefect_port, mlflow_port, last_servers(home).auth or new_auth(), str(home))


def _port(variable: str, usual: int, taken: int = 0) -> int:
    """The port that the user set, else the first free one from the usual one.

    Raises:
        BadInput: the port that the user set is no port, or is in use.
    """
    text = os.environ.get(variable)
    try:
        first = usual if text is None else PORT.validate_python(text)
    except ValidationError:
        raise BadInput(f"{variable}: expected a port, 1 to 65535, got {text!r}") from None
    candidates = range(first, first + (1 if text else PORTS_TO_TRY))
    free = (port for port in candidates if port != taken and _is_free(port))
    if port := next(free, None):
        return port
    raise BadInput(
        f"{variable}: port {first} is in use: stop the program that uses it, or set {variable} to "
        "a free port"
    )


def _is_free(port: int) -> bool:
    try:
        with socket.create_server((HOST, port)):
            return True
    except OSError:
        return False


def _start_servers(services: Services, servers: Servers, home: Path, log: LogLine) -> None:
    """Start both servers and wait for Prefect, which the next steps need."""
    services.start("prefect", "flows.orchestration.prefect_server", str(servers.prefect_port))
    mlflow_address = ("--host", HOST, "--port", str(servers.mlflow_port), "--workers", "1")
    # No page of another host, not even one whose name resolves to this machine
    pages = ("--allowed-hosts", f"{HOST}:*,localhost:*", "--cors-allowed-origins", servers.mlflow)
    database = home / MLFLOW_DATABASE
    records = ("--backend-store-uri", sqlite_uri(database))
    artifacts = ("--artifacts-destination", (home / MLFLOW_ARTIFACTS).as_uri())
    mlflow = ("flows.tracking.mlflow_server", str(database), "server")
    services.start("mlflow", *mlflow, *records, *artifacts, *mlflow_address, *pages)
    log(f"starting Prefect and MLflow (logs in {services.logs}) ...")
    import flows.orchestration.prefect_requests  # noqa: F401 - takes 2 s, in which they start

    services.wait_until("prefect", lambda: is_up(f"{servers.prefect}/api/health"))
