"""SIGKILL of `rondo run` itself, at its own records: params.yaml, the run, what waits for MLflow,
the report. The project is the small one of tests/flows, since only the stages are small there.
"""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.faults.conftest import RUN, Report
from tests.faults.lab import Kill, copy, kill_at, rondo
from tests.faults.scale import FULL, sample
from tests.faults.servers import trial_of

KILLS: list[Kill] = [
    ("rename", "params.yaml", 1),
    ("rename", ".rondo/outbox/*-*.0.json", 3),  # the record of prepare@r0
    ("rename", ".rondo/runs/*", 1),
    ("rename", ".rondo/runs/*", 2),
    ("open", "badcases/r0.jsonl", 1),
    ("rename", ".rondo/inputs.json", 1),
    ("rename", ".rondo/project_id", 1),
    ("open", ".rondo/outbox/.*-*.0.json.*.tmp", 1),
    ("remove", ".rondo/outbox/*-*.0.json", 1),
    ("remove", ".rondo/outbox/*-*.0.json", 4),
    ("rename", ".rondo/mlartifacts/rondo/*/artifacts/metrics.json", 2),
    ("rename", ".rondo/work/r0/sft/made.json", 1),
    ("rename", "reports/summary.md", 1),
    ("rename", "reports/report.html", 1),
    ("remove", ".rondo/outbox/*-*.0.json", 6),  # the record of the run
]


def check_records(project: Path, database: Path | None = None) -> None:
    """MLflow has the whole curve of each stage, no run that seems to go on, and nothing waits.

    Args:
        database: MLflow's; None for that of the project.
    """
    client = MlflowClient(f"sqlite:///{database or project / '.rondo/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    names = {run.info.run_name for run in runs}
    for stage in ("prepare@r0", "sft@r0", "evaluate@r0"):
        curves = [
            [point.value for point in client.get_metric_history(run.info.run_id, "loss")]
            for run in runs
            if run.info.run_name == stage and run.info.status == "FINISHED"
        ]
        assert [1, 1 / 2, 1 / 3] in curves, (stage, curves, names)
    last = max(runs, key=lambda run: run.info.start_time)
    parent = last.data.tags.get("mlflow.parentRunId", last.info.run_id)
    assert client.get_run(parent).info.status == "FINISHED"
    outbox = project / ".rondo/outbox"
    assert not [path.name for path in (*outbox.glob("*.json"), *outbox.glob("rejected/*"))]


@pytest.mark.parametrize(
    "kill", sample(KILLS, 4) if FULL else KILLS[:1], ids=lambda kill: " ".join(map(str, kill))
)
def test_a_kill_of_the_run_at_each_of_its_records(
    finished: Path, tmp_path: Path, kill: Kill, report: Report
) -> None:
    project = copy(finished / "before", tmp_path / "project")
    first = kill_at(project, RUN, kill)
    second = rondo(project, RUN)
    trial = trial_of(f"rondo run, {kill}", first, second, project, finished / "after")
    report("SIGKILL of rondo run", [trial], ("identical", "again"))
    check_records(project)
    shutil.rmtree(project)
