"""MLflow's server killed, hanging or full, Prefect's killed, in the middle of `rondo run`: the
results are those of a run without fault, and MLflow gets all records when it is back.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.projects import (
    FULL,
    RUN,
    States,
    check_mlflow,
    copy,
    differences,
)
from tests.faults.servers import MlflowServer, kill, mlflow_server, prefect_server, start
from tests.faults.test_disk import fill, small_disk
from tests.servers import of_project

pytestmark = pytest.mark.skipif(not FULL, reason="minutes: make test-faults")


@pytest.fixture
def after(states: States) -> Path:
    """The project after a run without fault."""
    return states("small", "one round").after


@pytest.fixture
def project(states: States, tmp_path: Path) -> Path:
    """A project in which nothing has run; its `sft` waits for the file `go`."""
    project = copy(states("small", "one round").before, tmp_path / "project")
    (project / "go").unlink()
    return project


@pytest.mark.parametrize("strike", [MlflowServer.kill, MlflowServer.hang])
def test_mlflow_in_the_middle_of_a_run(
    project: Path, after: Path, server: MlflowServer, strike: Callable[[MlflowServer], None]
) -> None:
    server.start()
    run = start(project, *RUN, MLFLOW_TRACKING_URI=server.url)
    run.reaches("[sft@r0] step 3/3")
    strike(server)
    (project / "go").touch()
    first = run.ended()
    assert first.code == 0 and "MLflow" in first.output, first.output
    assert not differences(project, after)
    server.go_on()
    second = start(project, *RUN, MLFLOW_TRACKING_URI=server.url).ended()
    assert second.code == 0 and not differences(project, after), second.output
    check_mlflow(server.database)


def test_the_disk_of_mlflow_is_full(
    project: Path, after: Path, tmp_path: Path, empty_tables: Path
) -> None:
    with (
        small_disk(tmp_path / "disk", "size=64m") as disk,
        mlflow_server(disk, empty_tables) as server,
    ):
        server.start()
        run = start(project, *RUN, MLFLOW_TRACKING_URI=server.url)
        run.reaches("[sft@r0] step 3/3")
        make_room = fill(disk, 0)
        (project / "go").touch()
        first = run.ended()
        assert first.code == 0 and "MLflow" in first.output, first.output
        make_room()
        second = start(project, *RUN, MLFLOW_TRACKING_URI=server.url).ended()
        assert second.code == 0 and not differences(project, after), second.output
        check_mlflow(server.database)


def test_a_teams_prefect_server_is_killed(
    project: Path, after: Path, tmp_path: Path, prefect_tables: Path
) -> None:
    # else its client waits for minutes at each request
    variables = {"MLFLOW_TRACKING_URI": "off", "PREFECT_CLIENT_MAX_RETRIES": "1"}
    with prefect_server(tmp_path / "prefect", prefect_tables) as (server, api):
        run = start(project, *RUN, PREFECT_API_URL=api, **variables)
        run.reaches("[sft@r0] step 3/3")
        kill(server, *server.children(recursive=True))
        (project / "go").touch()
        first = run.ended()
    assert first.code == 4 and "rondo: Unreachable: Prefect's server" in first.output, first.output
    assert "[evaluate@r0] ran" in first.output, first.output
    second = start(project, *RUN, **variables).ended()
    assert second.code == 0 and not differences(project, after), second.output


def test_the_temporary_server_of_prefect_is_killed(project: Path, after: Path) -> None:
    variables = {"MLFLOW_TRACKING_URI": "off", "PREFECT_CLIENT_MAX_RETRIES": "1"}
    run = start(project, *RUN, **variables)
    run.reaches("[sft@r0] step 3/3")
    server = of_project(project, "flows.orchestration.prefect_server")
    kill(*(process for process in server if "process_guard" not in " ".join(process.cmdline())))
    (project / "go").touch()
    first = run.ended()
    assert first.code == 4 and "rondo: Unreachable: Prefect's server" in first.output, first.output
    second = start(project, *RUN, **variables).ended()
    assert second.code == 0 and not differences(project, after), second.output
