"""SIGKILL of the first `rondo up` and of the first `rondo run`, in the middle of the tables of
Prefect's and MLflow's databases: the same command makes them.
"""

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import Report
from tests.faults.lab import Ended, copy, wait_for_processes
from tests.faults.scale import FULL
from tests.faults.servers import WAITING_RUN, kill, rondo_up, start, trial_of, up
from tests.flows.test_up import with_the_flow
from tests.servers import until

pytestmark = [
    pytest.mark.usefixtures("fast_processes"),
    pytest.mark.skipif(not FULL, reason="minutes: make test-faults"),
]
SOME_TABLES = 20  # entries of SQLite's schema; Prefect's has 220 in the end, MLflow's 110


def is_half_made(database: Path) -> bool:
    unfinished = database.with_name(f"{database.name}.unfinished")
    try:
        with closing(sqlite3.connect(f"file:{unfinished}?mode=ro", uri=True)) as connection:
            [count] = connection.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.OperationalError:
        return False
    return bool(count > SOME_TABLES)


@pytest.fixture(params=["prefect/prefect.db", "mlflow.db"])
def database(request: pytest.FixtureRequest, undisturbed: Path, tmp_path: Path) -> Path:
    """Of a project in which nothing has run yet."""
    home = copy(undisturbed / "before", tmp_path / "project") / ".rondo"
    path: Path = home / request.param
    path.unlink()
    return path


def test_the_first_run(database: Path, undisturbed: Path, tmp_path: Path, report: Report) -> None:
    project = tmp_path / "project"
    (project / "go").touch()
    first = start(project, *WAITING_RUN)
    until(lambda: is_half_made(database))
    first.process.kill()
    killed = first.ended(f"while {database} is made")
    assert not database.exists()
    second = start(project, *WAITING_RUN).ended()
    trial = trial_of("first run", killed, second, project, undisturbed / "after")
    report(
        "SIGKILL of the first `rondo run` while tables are made", [trial], ("identical", "again")
    )
    assert database.exists() and "MLflow" not in second.output, second.output


def test_the_first_up(database: Path, undisturbed: Path, tmp_path: Path, report: Report) -> None:
    project = tmp_path / "project"
    environment = with_the_flow(project)
    first = up(project, environment)
    until(lambda: is_half_made(database))
    struck = kill(*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid))
    wait_for_processes(project)
    assert not database.exists()
    with rondo_up(project, environment) as (_, output):
        assert "Ctrl-C ends both" in output and database.exists()
    killed, ready = Ended(-signal.SIGKILL, "", struck), Ended(0, output, "")
    trial = trial_of("first up", killed, ready, project, undisturbed / "before")
    report("SIGKILL of the first `rondo up` while tables are made", [trial])
