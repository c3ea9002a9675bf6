"""Notes of which run made what, in a real DVC project, with a real MLflow database."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.core.services import MLFLOW_URL
from flows.execution import dvc_stages
from flows.execution.energy import Meter
from flows.tracking import provenance
from flows.tracking.mlflow_store import MlflowTracker
from flows.tracking.records import NullTracker, read_lock
from stages.lib.core.files import read_json

FIRST, SECOND = provenance.RunRef("first", "abc"), provenance.RunRef("second", "def-dirty")


def ran(address: str, by: provenance.RunRef) -> str:
    """Bring a stage up to date, as flows/pipeline.py does; returns how."""
    with Meter([]) as meter:
        outcome = dvc_stages.run(address, lambda _: None).value
    if outcome == "ran":
        provenance.record_provenance(address, by, None, meter)
    return outcome


def made_by(address: str) -> str | None:
    found = provenance.read(address, read_lock(address))
    return found.run if found else None


def test_a_stage_that_is_restored_has_the_note_of_the_run_that_made_it(project: Path) -> None:
    assert made_by("assets") is None
    assert [ran(address, FIRST) for address in ("assets", "prepare@r0")] == ["ran", "ran"]
    seed, other = "seed: 0\n", "seed: 5\n"
    settings = Path("params.yaml")
    settings.write_text(settings.read_text().replace(seed, other))
    assert (ran("assets", SECOND), ran("prepare@r0", SECOND)) == ("unchanged", "ran")
    assert (made_by("assets"), made_by("prepare@r0")) == ("first", "second")
    settings.write_text(settings.read_text().replace(other, seed))
    assert ran("prepare@r0", SECOND) == "restored"
    assert made_by("prepare@r0") == "first"


def test_what_a_note_says_and_where_it_is(project: Path) -> None:
    before = datetime.now(UTC)
    ran("assets", SECOND)
    told = provenance.read("assets", read_lock("assets"))
    assert told is not None
    assert (told.run, told.revision, told.flow_run, told.mlflow, told.watt_hours) == (
        "second",
        "def-dirty",
        None,
        None,
        None,
    )
    assert before <= told.ended <= datetime.now(UTC)
    assert 0 < told.seconds < (datetime.now(UTC) - before).total_seconds() + 1
    assert list(read_json(Path(".rondo/work/assets/made.json"), "")) == [
        provenance.digest(read_lock("assets"))
    ]
    ran("prepare@r0", SECOND)
    assert Path(".rondo/work/r0/prepare/made.json").exists()


def test_a_stage_made_elsewhere_has_none(project: Path) -> None:
    ran("assets", FIRST)
    lock = read_lock("assets")
    assert provenance.read("assets", lock) is not None
    assert provenance.read("assets", {"outs": [lock["outs"][0] | {"md5": "0" * 32}]}) is None
    assert provenance.read("assets", {}) is None


def test_the_page_of_a_stage_in_mlflow(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"
    tracker = MlflowTracker("run", database, project / ".rondo", {}, print)
    tracker.start("assets")
    assert tracker.page("assets") is None
    tracker.finish(dvc_stages.run("assets", lambda _: None).value)
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("rondo")
    assert experiment is not None
    (stage,) = client.search_runs([experiment.experiment_id], "tags.`rondo.address` = 'assets'")
    assert (
        tracker.page("assets")
        == f"{MLFLOW_URL}/#/experiments/{experiment.experiment_id}/runs/{stage.info.run_id}?workflowType=machine_learning"
    )
    assert NullTracker().page() is None
