"""Real servers for a team: S3 (moto), PostgreSQL, and MLflow on both.

`make test-stores` makes the environments that the variable RONDO_STORES names: `stores`, which sees
the project's packages and has those of the extra `stores`; and `s3`, which has moto.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest
import requests

from tests.servers import free_port, until

FOLDER = os.environ.get("RONDO_STORES", "")
BUCKET = "rondo"


@dataclass(frozen=True)
class Stores:
    """Addresses. folder: of both environments."""

    folder: Path
    s3: str
    postgres: str
    mlflow: str

    @property
    def python(self) -> str:
        return str(self.folder / "stores/bin/python")

    def environment(self, home: Path) -> dict[str, str]:
        """The variables of a member of the team whose home is `home`; nothing else is shared."""
        home.mkdir(exist_ok=True)
        return {
            "PATH": f"{self.folder / 'stores/bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
            "OMP_NUM_THREADS": "1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "MLFLOW_TRACKING_URI": self.mlflow,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self.postgres.replace(
                "postgresql://", "postgresql+asyncpg://"
            )
            + "/prefect",
        }


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    def answers() -> bool:
        assert process.poll() is None, f"{url}: the server has ended"
        try:
            return requests.get(url, timeout=5).status_code < 500
        except requests.RequestException:
            return False

    until(answers, 120)


@pytest.fixture(scope="session")
def stores(tmp_path_factory) -> Iterator[Stores]:
    if not FOLDER:
        pytest.skip("needs servers and packages of their own: make test-stores makes them")
    folder, work = Path(FOLDER), tmp_path_factory.mktemp("stores")
    s3, mlflow = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    processes = []
    # not in pytest's folder, which is for one user
    database = Path(mkdtemp(prefix="rondo-postgres-"))
    postgres = start_postgres(database)
    try:
        made = Stores(folder, s3, postgres, mlflow)
        environment = os.environ | made.environment(work / "home")
        with (work / "servers.log").open("w") as log:
            command = [str(folder / "s3/bin/moto_server"), "-p", s3.rsplit(":")[-1]]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait_for(s3, processes[-1])
            requests.put(f"{s3}/{BUCKET}", timeout=30).raise_for_status()
            server = [
                *(made.python, "-m", "mlflow", "server", "--port", mlflow.rsplit(":")[-1]),
                *("--backend-store-uri", f"{postgres}/mlflow"),
                *("--artifacts-destination", f"s3://{BUCKET}/mlflow"),
            ]
            of_s3 = {"MLFLOW_S3_ENDPOINT_URL": s3}
            processes.append(
                subprocess.Popen(server, env=environment | of_s3, stdout=log, stderr=log, cwd=work)
            )
            wait_for(f"{mlflow}/health", processes[-1])
            yield made
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        as_postgres(["pg_ctl", "-D", str(database), "-m", "immediate", "stop"])
        shutil.rmtree(database)


def start_postgres(folder: Path) -> str:
    """The address of a new server with the databases `prefect` and `mlflow`."""
    port = free_port()
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    as_postgres(["initdb", "-D", str(folder), "-U", "rondo", "-A", "trust"])
    settings = f"-p {port} -k {folder} -c fsync=off -c listen_addresses=127.0.0.1"
    log = str(folder / "log")
    as_postgres(["pg_ctl", "-D", str(folder), "-w", "-l", log, "-o", settings, "start"])
    address = f"postgresql://rondo@127.0.0.1:{port}"
    for name in ("prefect", "mlflow"):
        query(f"{address}/postgres", f"create database {name}")
    return address


def as_postgres(command: list[str]) -> None:
    """Run a command of PostgreSQL, which refuses to run as root."""
    user = "postgres" if os.geteuid() == 0 else None
    subprocess.run(command, check=True, user=user, stdout=subprocess.DEVNULL, cwd="/")


def query(database: str, statement: str) -> list[str]:
    """The rows of a statement, each as one line."""
    process = subprocess.run(
        ["psql", database, "-X", "-A", "-t", "-c", statement],
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout.splitlines()
