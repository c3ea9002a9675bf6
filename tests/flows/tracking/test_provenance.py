"""Provenance of stages in a real DVC project."""

from datetime import UTC, datetime
from pathlib import Path

from flows.core.locks import read_lock
from flows.execution import dvc_stages
from flows.execution.meter import Meter
from flows.tracking import provenance
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


def test_the_run_that_produced_the_outputs_of_a_stage(project: Path) -> None:
    assert producer("assets") is None
    before = datetime.now(UTC)
    assert run_stage("assets", SECOND) == "ran"
    lock = read_lock("assets")
    entry = provenance.read("assets", lock)
    assert entry is not None
    assert (entry.run, entry.revision) == ("second", "def-dirty")
    assert (entry.flow_run, entry.mlflow) == (None, None)
    assert before <= entry.ended <= datetime.now(UTC)
    assert 0 < entry.seconds < (datetime.now(UTC) - before).total_seconds() + 1
    keys = list(read_json(Path(".rondo/work/assets/made.json"), ""))
    assert keys == [provenance.outputs_hash(lock)]
    # outputs of another folder
    assert provenance.read("assets", {"outs": [lock["outs"][0] | {"md5": "0" * 32}]}) is None
    assert provenance.read("assets", {}) is None

    assert run_stage("prepare@r0", FIRST) == "ran"
    assert Path(".rondo/work/r0/prepare/made.json").exists()
    seed, other = "seed: 0\n", "seed: 5\n"
    settings = Path("params.yaml")
    settings.write_text(settings.read_text().replace(seed, other))
    assert (run_stage("assets", FIRST), run_stage("prepare@r0", SECOND)) == ("unchanged", "ran")
    assert (producer("assets"), producer("prepare@r0")) == ("second", "second")
    settings.write_text(settings.read_text().replace(other, seed))
    assert run_stage("prepare@r0", SECOND) == "restored"
    assert producer("prepare@r0") == "first"
