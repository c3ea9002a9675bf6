"""`rondo up`: Prefect server, a worker and MLflow on loopback, until Ctrl-C."""

import itertools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.core.databases import check_database
from flows.core.services import (
    API_URL,
    HOST,
    MLFLOW_ARTIFACTS,
    MLFLOW_DATABASE,
    MLFLOW_PORT,
    PREFECT_DATABASE,
    PREFECT_PORT,
    WORKFLOW,
    LogLine,
    Servers,
    is_up,
    last_servers,
    new_auth,
    prefect_environment,
    server_environment,
    sqlite_uri,
    write_servers,
)
from flows.orchestration.service_processes import Services, lock_folder
from flows.orchestration.worker import OWN, services_until_signal, start_worker, watch
from stages.lib.core.errors import BadInput

NOTIFY_URL = "RONDO_NOTIFY_URL"
MAX_PORT = 65535


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
    notify = os.environ.pop(NOTIFY_URL, None)
    if notify:
        _check_webhook(notify)
    os.environ.update(prefect_environment(home))
    lock = lock_folder(home)  # noqa: F841 - held while this function runs
    for name in (PREFECT_DATABASE, MLFLOW_DATABASE):
        check_database(home / name)
    servers = _new_servers(home)
    own_pages = (f"http://{name}:{servers.prefect_port}" for name in (HOST, "localhost"))
    os.environ.update(server_environment(servers.auth, *own_pages))
    os.environ[API_URL] = f"{servers.prefect}/api"
    with services_until_signal(OWN, home) as services:
        _start_servers(services, servers, home, log)
        _notify(notify, log)
        start_worker(services, OWN, home, log)
        services.wait_until("mlflow", lambda: is_up(f"{servers.mlflow}/health"))
        log(
            f"Prefect  {servers.login}\n"
            "         This link logs your browser in. Start a run at Deployments: rlhf-pipeline, "
            "next-round, sweep, evaluate-checkpoint\n"
            f"MLflow   {servers.mlflow}/#/experiments?{WORKFLOW}\nCtrl-C ends both."
        )
        watch(services, home, log)


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


def _start_servers(services: Services, servers: Servers, home: Path, log: LogLine) -> None:
    """Start both servers and wait for Prefect, which the next steps need."""
    prefect_address = ("--host", HOST, "--port", str(servers.prefect_port))
    services.start(
        "prefect", "flows.orchestration.prefect_server", "server", "start", *prefect_address
    )
    mlflow_address = ("--host", HOST, "--port", str(servers.mlflow_port), "--workers", "1")
    # No page of another host, not even one whose name resolves to this machine
    pages = ("--allowed-hosts", f"{HOST}:*,localhost:*", "--cors-allowed-origins", servers.mlflow)
    database = home / MLFLOW_DATABASE
    records = ("--backend-store-uri", sqlite_uri(database))
    artifacts = ("--artifacts-destination", (home / MLFLOW_ARTIFACTS).as_uri())
    mlflow = ("flows.tracking.mlflow_server", str(database), "server")
    services.start("mlflow", *mlflow, *records, *artifacts, *mlflow_address, *pages)
    write_servers(home, servers)
    log(f"starting Prefect and MLflow (logs in {services.logs}) ...")
    import flows.orchestration.prefect_requests  # noqa: F401 - takes 2 s, in which they start

    services.wait_until("prefect", lambda: is_up(f"{servers.prefect}/api/health"))


def _notify(webhook: str | None, log: LogLine) -> None:
    """Set up the notifications of Prefect's runs."""
    from flows.orchestration import notifications

    for name in notifications.set_up_notifications(webhook):
        log(f"notifications: block `{notifications.BLOCK}` ({name})")
