"""Provenance of stages in a real DVC project, with a real MLflow database."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.core.locks import read_lock
from flows.core.services import Servers
from flows.execution import dvc_stages
from flows.execution.meter import Meter
from flows.tracking import provenance
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.lib.core.files import read_json

FIRST, SECOND = provenance.RunRef("first", "abc"), provenance.RunRef("second", "def-dirty")


def run_stage(address: str, by: provenance.RunRef) -> str:
    """Bring a stage up to date, as flows/pipeline.py does; returns the outcome."""
    with Meter() as meter:
        outcome = dvc_stages.run(address, lambda _: None).value
    if outcome == "ran":
        provenance.record_provenance(address, by, None, meter)
    return outcome


def producer(address: str) -> str | None:
    """The run that produced the current outputs of a stage."""
    entry = provenance.read(address, read_lock(address))
    return entry.run if entry else None


def test_a_restored_stage_has_the_provenance_of_the_run_that_produced_it(project: Path) -> None:
    assert producer("assets") is None
    assert [run_stage(address, FIRST) for address in ("assets", "prepare@r0")] == ["ran", "ran"]
    seed, other = "seed: 0\n", "seed: 5\n"
    settings = Path("params.yaml")
    settings.write_text(settings.read_text().replace(seed, other))
    assert [run_stage(address, SECOND) for address in ("assets", "prepare@r0")] == [
        "unchanged",
        "ran",
    ]
    assert (producer("assets"), producer("prepare@r0")) == ("first", "second")
    settings.write_text(settings.read_text().replace(other, seed))
    assert run_stage("prepare@r0", SECOND) == "restored"
    assert producer("prepare@r0") == "first"


def test_the_content_and_path_of_provenance(project: Path) -> None:
    before = datetime.now(UTC)
    run_stage("assets", SECOND)
    entry = provenance.read("assets", read_lock("assets"))
    assert entry is not None
    assert (entry.run, entry.revision) == ("second", "def-dirty")
    assert (entry.flow_run, entry.mlflow) == (None, None)
    assert before <= entry.ended <= datetime.now(UTC)
    assert 0 < entry.seconds < (datetime.now(UTC) - before).total_seconds() + 1
    keys = list(read_json(Path(".rondo/work/assets/made.json"), ""))
    assert keys == [provenance.outputs_hash(read_lock("assets"))]
    run_stage("prepare@r0", SECOND)
    assert Path(".rondo/work/r0/prepare/made.json").exists()


def test_outputs_of_another_folder_have_no_provenance(project: Path) -> None:
    run_stage("assets", FIRST)
    lock = read_lock("assets")
    assert provenance.read("assets", lock) is not None
    assert provenance.read("assets", {"outs": [lock["outs"][0] | {"md5": "0" * 32}]}) is None
    assert provenance.read("assets", {}) is None


def test_the_page_of_a_stage_in_mlflow(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    tracker = MlflowTracker("run", database, project / ".rondo", {}, print)
    tracker.begin()
    tracker.start("assets", Meter())
    assert tracker.page("assets") is None
    tracker.finish(dvc_stages.run("assets", lambda _: None).value)
    tracker.flush()
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("rondo")
    assert experiment is not None
    (stage,) = client.search_runs([experiment.experiment_id], "tags.`rondo.address` = 'assets'")
    page = f"/#/experiments/{experiment.experiment_id}/runs/{stage.info.run_id}"
    assert tracker.page("assets") == f"{Servers().mlflow}{page}?workflowType=machine_learning"
