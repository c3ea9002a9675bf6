"""MLflow's server killed, hanging or full, Prefect's killed, in the middle of `rondo run`: the
results are those of a run without fault, and MLflow gets all records when it is back.

The servers of `rondo up`, killed one by one during a run of its API: test_up_kills.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Report
from tests.faults.lab import copy
from tests.faults.scale import FULL
from tests.faults.servers import (
    WAITING_RUN,
    MlflowServer,
    is_guard,
    kill,
    mlflow_server,
    prefect_server,
    start,
    trial_of,
)
from tests.faults.test_disk import fill, small_disk
from tests.faults.test_run_kills import check_records
from tests.servers import of_project

Strike = Callable[[MlflowServer], str]
pytestmark = [
    pytest.mark.usefixtures("fast_processes"),
    pytest.mark.skipif(not FULL, reason="minutes: make test-faults"),
]


def killed(server: MlflowServer) -> str:
    return server.kill()


def killed_and_back(server: MlflowServer) -> str:
    victims = server.kill()
    server.start()
    return victims


def hanging(server: MlflowServer) -> str:
    return server.hang()


@pytest.mark.parametrize("strike", [killed, killed_and_back, hanging])
def test_mlflow_in_the_middle_of_a_run(
    undisturbed: Path, tmp_path: Path, server: MlflowServer, strike: Strike, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    server.start()
    run = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI=server.url)
    run.reaches("[sft@r0] step 3/3")
    struck = strike(server)
    (project / "go").touch()
    first = run.ended(struck)
    assert first.code == 0, first.output
    back = strike is killed_and_back
    waiting = list((project / ".rondo/outbox").glob("*.json"))
    assert bool(waiting) != back and ("MLflow is missing" in first.output) != back, first.output
    if strike is killed:
        server.start()
    if strike is hanging:
        server.go_on()
    second = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI=server.url).ended()
    trial = trial_of(f"MLflow {strike.__name__}", first, second, project, undisturbed / "after")
    report(f"MLflow's server in a run: {strike.__name__}", [trial])
    check_records(project, server.database)


def test_the_disk_of_mlflow_is_full(
    undisturbed: Path, tmp_path: Path, empty_tables: Path, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    with (
        small_disk(tmp_path / "disk", "size=64m") as disk,
        mlflow_server(disk, empty_tables) as server,
    ):
        server.start()
        run = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI=server.url)
        run.reaches("[sft@r0] step 3/3")
        make_room = fill(disk, 0)
        (project / "go").touch()
        first = run.ended("the disk of the database")
        assert first.code == 0 and "MLflow is missing" in first.output, first.output
        full = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI=server.url).ended()
        assert full.code == 0 and "MLflow is missing" in full.output, full.output
        make_room()
        second = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI=server.url).ended()
        trial = trial_of("MLflow's full disk", first, second, project, undisturbed / "after")
        report("MLflow's server in a run: its disk is full", [trial])
        check_records(project, server.database)
        server.kill()


def test_a_prefect_server_of_a_team_is_killed_and_stays_away(
    undisturbed: Path, tmp_path: Path, prefect_tables: Path, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    # else the client tries for minutes at each request
    environment = {"MLFLOW_TRACKING_URI": "off", "PREFECT_CLIENT_MAX_RETRIES": "1"}
    with prefect_server(tmp_path / "prefect", prefect_tables) as (server, api):
        run = start(project, *WAITING_RUN, PREFECT_API_URL=api, **environment)
        run.reaches("[sft@r0] step 3/3")
        struck = kill(server, *server.children(recursive=True))
        (project / "go").touch()
        first = run.ended(struck)
    assert first.code == 4, first.output
    assert "rondo: Unreachable: Prefect's server at http" in first.output, first.output
    assert "[evaluate@r0] ran" in first.output
    second = start(project, *WAITING_RUN, **environment).ended()
    trial = trial_of("Prefect's server", first, second, project, undisturbed / "after")
    report("SIGKILL of a team's Prefect server in a run", [trial])


def test_the_temporary_server_of_prefect_is_killed(
    undisturbed: Path, tmp_path: Path, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    run = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI="off")
    run.reaches("[sft@r0] step 3/3")
    server = of_project(project, "uvicorn", "prefect.server.api.server:create_app")
    struck = kill(*(process for process in server if not is_guard(process)))
    (project / "go").touch()
    first = run.ended(struck)
    assert first.code == 0, first.output  # the run started the server again
    second = start(project, *WAITING_RUN, MLFLOW_TRACKING_URI="off").ended()
    trial = trial_of("Prefect's server", first, second, project, undisturbed / "after")
    report("SIGKILL of the temporary Prefect server of a run", [trial])
    shutil.rmtree(project)
