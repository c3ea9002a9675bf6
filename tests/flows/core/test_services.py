"""Which server is this project's: real processes and real ports."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from prefect.settings.models.worker import WorkerSettings

from flows.core.services import (
    LOCK,
    SERVERS,
    Servers,
    last_servers,
    new_auth,
    prefect_environment,
    private_folder,
    running_mlflow,
    running_prefect,
    write_servers,
)
from flows.orchestration import server
from flows.orchestration.server import _new_servers
from flows.orchestration.service_processes import service_environment
from stages.lib.core.errors import BadInput
from tests.paths import ROOT
from tests.servers import read_until

UNKNOWN_USER = """
import getpass, os
from flows.core.services import prepare_environment
os.setuid(54321)
prepare_environment()
print(getpass.getuser(), os.path.expanduser("~"), os.environ["XDG_CACHE_HOME"])
"""
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    print("port", server.server_port, flush=True)
    server.serve_forever()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / ".rondo"
    private_folder(folder)
    return folder


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that answers everything, a child of this process."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield int(read_until(server, "port").split()[1])
    server.kill()
    server.communicate()


def servers_on(port: int, home: Path) -> Servers:
    return Servers(port, port, new_auth(), str(home))


def test_a_server_is_the_projects_while_rondo_up_lives(home: Path, port: int) -> None:
    assert last_servers(home) == Servers() and running_prefect(home) is None
    servers = servers_on(port, home)
    write_servers(home, servers)
    assert last_servers(home) == servers and running_prefect(home) is running_mlflow(home) is None
    with FileLock(home / LOCK):
        assert running_prefect(home) == running_mlflow(home) == servers
        # in the workspace of a run
        (home / "workspace").mkdir()
        (home / "workspace" / SERVERS).symlink_to(home / SERVERS)
        assert running_mlflow(home / "workspace") == servers
        write_servers(home, replace(servers, prefect_port=port + 1))
        assert running_prefect(home) is None
    (home / SERVERS).write_text('{"prefect_port": 1, "of": "another version"}')
    assert last_servers(home) == Servers()


def test_a_copied_project_has_no_servers(home: Path, port: int, tmp_path: Path) -> None:
    write_servers(home, servers_on(port, home))
    copy = tmp_path / "copy" / ".rondo"
    shutil.copytree(home, copy)
    with FileLock(home / LOCK):
        assert running_prefect(copy) is running_mlflow(copy) is None
    assert _new_servers(copy).auth != last_servers(home).auth


def test_only_the_owner_reads_what_rondo_keeps(home: Path, port: int) -> None:
    write_servers(home, servers_on(port, home))
    assert (mode(home), mode(home / SERVERS)) == (0o700, 0o600)
    home.chmod(0o755)  # made by `dvc repro`, or an older version
    prefect_environment(home)
    assert mode(home) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_without_passwd_entry_and_home_has_a_name_and_a_cache(tmp_path: Path) -> None:
    names = {"LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN_USER],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["uid54321", f"{tmp_path}/.rondo", f"{tmp_path}/.rondo/cache"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://ada:very-secret@127.0.0.1:9"),
        ("all_proxy", "socks://127.0.0.1:9"),
        ("HTTPS_PROXY", "http://ada:very-secret@proxy:port"),
        ("NO_PROXY", "localhost,fe80::/10"),
        ("SSL_CERT_FILE", "/no/such/file"),
    ],
)
def test_a_proxy_or_certificate_that_cannot_be_used_is_named_at_once(
    home: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in [other for other in os.environ if other.lower().endswith("_proxy")]:
        monkeypatch.delenv(other)  # one in lower case is used in place of one in upper case
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "::1,10.0.0.0/8,.corp")
    prefect_environment(home)
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=rf"\b{name}\b.*Next: correct or unset") as refused:
        prefect_environment(home)
    assert "very-secret" not in str(refused.value)


def test_used_ports_are_left_to_others(
    home: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PREFECT_SERVER_API_PORT", "MLFLOW_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(server, "PREFECT_PORT", port)  # in use
    monkeypatch.setattr(server, "MLFLOW_PORT", port)
    chosen = _new_servers(home)
    assert port < chosen.prefect_port < chosen.mlflow_port
    write_servers(home, chosen)
    assert _new_servers(home) == chosen  # the same string, so that a browser stays logged in
    monkeypatch.setenv("MLFLOW_PORT", str(port))
    with pytest.raises(BadInput, match=f"MLFLOW_PORT: port {port} is in use"):
        _new_servers(home)
    monkeypatch.setenv("MLFLOW_PORT", str(chosen.prefect_port))  # free, but Prefect gets it
    with pytest.raises(BadInput, match=r"MLFLOW_PORT: port \d+ is in use"):
        _new_servers(home)
    for no_port in ("", "abc", "0", "65536", "-1"):
        monkeypatch.setenv("MLFLOW_PORT", no_port)
        with pytest.raises(BadInput, match=f"MLFLOW_PORT: expected a port.*'{no_port}'"):
            _new_servers(home)


@pytest.mark.parametrize(("users_value", "seconds"), [(None, 2.0), ("7", 7.0)])
def test_the_worker_looks_for_runs_every_2_seconds_unless_the_user_set_others(
    users_value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_WORKER_QUERY_SECONDS", raising=False)
    if users_value:
        monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", users_value)
    for name, value in service_environment().items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings().query_seconds == seconds
