"""A clock that jumps by a day in the middle of a run: the results are the same, and no duration is
negative. Prefect reads the clock in C, which does not jump here.
"""

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.faults.conftest import Report
from tests.faults.lab import copy
from tests.faults.scale import FULL
from tests.faults.servers import WAITING_RUN, start, trial_of
from tests.faults.test_run_kills import check_records
from tests.servers import rondo

DAY = 24 * 3600
pytestmark = pytest.mark.skipif(not FULL, reason="minutes: make test-faults")


def check_durations(project: Path) -> None:
    """No run of MLflow ends before its start; no command shows a negative time."""
    client = MlflowClient(f"sqlite:///{project / '.rondo/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert all(run.info.start_time <= run.info.end_time for run in runs)
    status, report = rondo(project, "status"), rondo(project, "report")
    assert status.returncode == report.returncode == 0, status.stderr + report.stderr
    assert "to do" not in status.stdout
    page = (project / "reports/report.html").read_text()
    assert not re.search(r"<td[^>]*>\s*-\d", page) and not re.search(r"\s-\d", status.stdout)


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_in_the_middle_of_a_run(
    undisturbed: Path, tmp_path: Path, jump: int, report: Report
) -> None:
    project = copy(undisturbed / "before", tmp_path / "project")
    clock = tmp_path / "clock"
    clock.write_text("0")
    run = start(project, *WAITING_RUN, RONDO_CLOCK=str(clock))
    run.reaches("[sft@r0] step 3/3")
    clock.write_text(str(jump))
    (project / "go").touch()
    first = run.ended(f"a clock, {jump} s")
    assert first.code == 0, first.output
    assert not re.search(r"\s-\d+:\d\d", first.output), first.output
    second = start(project, *WAITING_RUN).ended()  # the clock jumps back
    trial = trial_of(f"a clock, {jump} s", first, second, project, undisturbed / "after")
    report("a clock that jumps by a day in a run", [trial])
    check_records(project)
    check_durations(project)
