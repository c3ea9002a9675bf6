"""SIGKILL of each service of `rondo up`, and of `rondo up` itself, in the middle of a run that its
API started; `rondo up` again brings each run to its end.
"""

from pathlib import Path

import psutil
import pytest

from flows.core.services import is_up
from tests.faults.conftest import Report
from tests.faults.lab import Ended, copy
from tests.faults.scale import FULL
from tests.faults.servers import Process, in_sft, is_guard, kill, rondo_up, trial_of
from tests.faults.test_run_kills import check_records
from tests.flows.test_up import finished, guards, start, with_the_flow
from tests.servers import prefect_api, read_until, request, until

SERVICES = {  # words of their command lines
    "mlflow": {"flows.tracking.mlflow_server"},
    "worker": {"worker", "start"},
    "prefect": {"server", "start", "flows.orchestration.prefect_server"},
}
pytestmark = [
    pytest.mark.usefixtures("fast_processes"),
    pytest.mark.skipif(not FULL, reason="minutes: make test-faults"),
]


def victims_of(server: Process, victim: str) -> list[psutil.Process]:
    """The processes of a service, without the guard that waits for them."""
    if victim == "up":
        return [psutil.Process(server.pid)]
    [guard] = guards(server, SERVICES[victim])
    return [process for process in guard.children() if not is_guard(process)]


@pytest.mark.parametrize("victim", [*SERVICES, "up"])
def test_a_victim_in_the_middle_of_a_run(
    undisturbed: Path, tmp_path: Path, victim: str, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    environment = with_the_flow(project)
    with rondo_up(project, environment) as (server, _):
        api = prefect_api(project)
        pipeline = request(f"{api}/deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
        run = start(api, pipeline, "sft.max_steps=51")
        until(lambda: in_sft(project))
        struck = kill(*victims_of(server, victim))
        if victim in ("mlflow", "worker"):  # `rondo up` starts it again
            read_until(server, f"{victim} ended with")
            until(lambda: guards(server, SERVICES[victim]))
            mlflow = f"http://127.0.0.1:{environment['MLFLOW_PORT']}/health"
            until(lambda: is_up(mlflow))  # else the next run sends the records
            (project / "go").touch()
            state = finished(api, run)
            if victim == "worker" and state == "Crashed":  # the button *Retry* goes on
                retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
                request(f"{api}/flow_runs/{run}/set_state", retry)
                until(lambda: request(f"{api}/flow_runs/{run}")["state_type"] != "CRASHED")
                state = finished(api, run)
        else:
            assert server.wait(60) or victim == "up"  # whose exit code `kill` has read
    if victim in ("prefect", "up"):
        with rondo_up(project, environment) as (_, output):
            assert f"resumes: {run}" in output
            (project / "go").touch()
            state = finished(api, run)
    ended = Ended(int(state != "Completed"), state, struck)
    trial = trial_of(f"rondo up: {victim}", ended, ended, project, undisturbed / "after")
    report(f"SIGKILL in rondo up: {victim}", [trial])
    check_records(project)
