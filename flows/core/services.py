"""The servers of `rondo up`: their addresses, whether they run, and how a client logs in.

`rondo up` writes .rondo/servers.json, which only its owner can read. A port alone identifies no
server: another project, or another person on this machine, may use the same one. So a server is
used only while `rondo up` holds the lock of this folder.
"""

import getpass
import json
import os
import re
import secrets
import socket
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from pydantic import Field, TypeAdapter

from flows.core.run_locks import is_free
from stages.lib.core.errors import BadInput
from stages.lib.core.files import replacing

Port = Annotated[int, Field(gt=0, lt=2**16)]
LogLine = Callable[[str], None]

HOST = "127.0.0.1"
HOME = Path(".rondo")
SERVERS = "servers.json"  # in HOME
LOCK = "up.lock"  # in HOME: held by `rondo up` or `rondo worker`
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
# Without this parameter MLflow opens its pages for agents instead of those for models.
WORKFLOW = "workflowType=machine_learning"
EXPERIMENT = "rondo"  # of MLflow; its artifacts in the MLflow of `rondo up`:
ARTIFACTS = f"mlflow-artifacts:/{EXPERIMENT}"
TRACKING_URI = "MLFLOW_TRACKING_URI"  # MLflow's own variable
API_URL = "PREFECT_API_URL"  # Prefect's own variable
# Prefect's own variable, too: "true" if its server ends with this process
TEMPORARY = "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"
# What `rondo worker` tells its runs: its name, and the git remote that gets the branches of runs
WORKER, PUSH_TO = "RONDO_WORKER", "RONDO_PUSH_TO"
CACHE = "XDG_CACHE_HOME"  # which the clients of model hubs and torch read
# Git's own variables, which its hooks have: with one, git works on that repository everywhere
OF_GIT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
MLFLOW_DATABASE, MLFLOW_ARTIFACTS = "mlflow.db", "mlartifacts"  # in HOME
PREFECT_DATABASE = "prefect/prefect.db"  # in HOME
START_SECONDS = 120.0  # for a server to answer


@dataclass(frozen=True)
class Servers:
    """The servers of a `rondo up`.

    prefect_port, mlflow_port: on HOST. auth: what Prefect's API asks for, `user:password`. home:
    the .rondo folder of `rondo up`, since the file may be part of a copied project.
    """

    prefect_port: Port = PREFECT_PORT
    mlflow_port: Port = MLFLOW_PORT
    auth: str = ""
    home: str = ""

    @property
    def prefect(self) -> str:
        return f"http://{HOST}:{self.prefect_port}"

    @property
    def login(self) -> str:
        """The page that logs a browser in."""
        return f"{self.prefect}/rondo#{self.auth}"

    @property
    def mlflow(self) -> str:
        return f"http://{HOST}:{self.mlflow_port}"


SERVERS_FILE = TypeAdapter(Servers)


def sqlite_uri(path: Path) -> str:
    """MLflow's address of a SQLite database; quoted if its path has signs of addresses."""
    text = str(path)
    # No slash stays in a quoted path: MLflow makes a folder for what is before the last one.
    return f"sqlite:///{quote(text, safe='') if {'%', '?'} & {*text} else text}"


def private_folder(home: Path) -> None:
    """Create the .rondo folder, which only its owner may read, or make an existing one so.

    Raises:
        BadInput: it belongs to another user.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
    except PermissionError:
        raise BadInput(
            f"{home}: it, or the project's folder, belongs to another user; two users cannot share "
            "a project's folder: work in a clone of your own"
        ) from None


def write_servers(home: Path, servers: Servers) -> None:
    """Write the file that only its owner can read; a reader gets the old one or the new one."""
    with replacing(home / SERVERS) as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(json.dumps(asdict(servers)).encode())


def last_servers(home: Path = HOME) -> Servers:
    """The servers of the last `rondo up`, running or not; their defaults if there was none."""
    try:
        path = (home / SERVERS).resolve(strict=True)  # a link in the workspace of a run
        servers = SERVERS_FILE.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return Servers()
    return servers if servers.home == str(path.parent) else Servers()


def new_auth() -> str:
    """A random string for Prefect's API, or for the login of our own pages."""
    return f"rondo:{secrets.token_urlsafe(32)}"


def running_prefect(home: Path = HOME) -> Servers | None:
    """The servers of this project if its Prefect server runs."""
    servers = last_servers(home)
    return servers if _held(servers) and is_up(f"{servers.prefect}/api/health") else None


def running_mlflow(home: Path = HOME) -> Servers | None:
    """The servers of this project if its MLflow server runs."""
    servers = last_servers(home)
    return servers if _held(servers) and is_up(f"{servers.mlflow}/health") else None


def _held(servers: Servers) -> bool:
    """Whether the `rondo up` of these servers lives."""
    lock = Path(servers.home, LOCK)
    return bool(servers.home) and lock.exists() and not is_free(lock)


def mlflow_answers(home: Path = HOME) -> bool:
    """Whether MLflow's pages can be opened: a server that the user names counts as running."""
    return bool(os.environ.get(TRACKING_URI) or running_mlflow(home))


def mlflow_pages(home: Path = HOME) -> str | None:
    """The address of MLflow's pages: of the user's server (MLFLOW_TRACKING_URI), else of the server
    of `rondo up`, running or not; None if the user's store has no pages.
    """
    uri = os.environ.get(TRACKING_URI, "")
    if not uri:
        return last_servers(home).mlflow
    return without_credentials(uri).rstrip("/") if uri.startswith("http") else None


def experiment_page(server: str, experiment: str) -> str:
    """The page of all runs in an MLflow experiment."""
    return f"{server}/#/experiments/{experiment}/runs?{WORKFLOW}"


def prefect_pages(home: Path = HOME) -> str:
    """The address of Prefect's pages: of the server that PREFECT_API_URL names, which this process
    or a worker uses, else of the server of `rondo up`, running or not. A temporary server has none.
    """
    temporary = os.environ.get(TEMPORARY) == "true"
    url = "" if temporary else without_credentials(os.environ.get(API_URL, ""))
    return url.rstrip("/").removesuffix("/api") or last_servers(home).prefect


def flow_run_page(server: str, flow_run: str) -> str:
    """The address of a flow run on the pages of a Prefect server."""
    return f"{server}/runs/flow-run/{flow_run}"


def prepare_environment() -> None:
    """Change the variables that this process and its children read: an empty one of Prefect or
    MLflow counts as not set, those that git gives its hooks are removed, no proxy is used for this
    machine, and a user without an entry in passwd, or without a home, has a name and a cache.
    """
    for name, value in list(os.environ.items()):
        if name in OF_GIT or (not value and name.startswith(("PREFECT_", "MLFLOW_"))):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        own = os.environ.get(name, "")
        os.environ[name] = ",".join(filter(None, [own, HOST, "localhost"]))
    try:
        getpass.getuser()  # as DVC does
    except (KeyError, OSError):  # Python 3.13: OSError
        os.environ["USER"] = f"uid{os.getuid()}"
    own_home = os.path.expanduser("~")
    if not os.access(own_home, os.W_OK):
        os.environ.setdefault(CACHE, str(HOME.resolve() / "cache"))
        if own_home == "~":  # there is none
            os.environ["HOME"] = str(HOME.resolve())


def check_http() -> None:
    """
    Raises:
        BadInput: the client with which Prefect, model hubs and judges are asked cannot use the
            proxies or certificates of the environment.
    """
    import httpx

    try:
        httpx.Client().close()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        names = sorted(name for name in os.environ if re.search("(?i)_proxy$|^ssl_cert", name))
        raise BadInput(
            f"{', '.join(names)}: {without_credentials(str(error))}. Next: correct or unset the "
            "variable, or name an HTTP proxy (NO_PROXY: names and single addresses)"
        ) from None


def prefect_environment(home: Path) -> dict[str, str]:
    """The variables that Prefect reads at import: its files in .rondo (created here), no analytics,
    no prompts.

    Raises:
        BadInput: as `check_http` and `private_folder`.
    """
    check_http()
    private_folder(home)
    (home / "prefect").mkdir(exist_ok=True)
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        TEMPORARY: "false",
        "PREFECT_CLI_PROMPT": "false",
        # leases of concurrency slots survive a restart of the server
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
    }


def server_environment(auth: str, *origins: str) -> dict[str, str]:
    """The variables that close Prefect's API to everyone without `auth`, and to all pages of a
    browser but those of `origins`.
    """
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
    }


def without_credentials(text: str) -> str:
    """The text with no user and password in its URLs."""
    return re.sub("//[^/@ ]*@", "//", text)


def is_up(url: str) -> bool:
    """Whether a GET of `url` returns status 200 within 2 seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; bound before slow work, so that a taken port is found at once.

    Raises:
        BadInput: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"--host {host} --port {port}: {reason}: choose another") from None
