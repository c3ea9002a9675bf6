"""Records and trackers with a real MLflow database, and with a port that nothing listens on."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from pandas import DataFrame

from flows.core.locks import read_lock
from flows.execution import dvc_stages
from flows.execution.meter import Meter
from flows.tracking import records
from flows.tracking.mlflow_store import MlflowStore
from flows.tracking.mlflow_tracker import MlflowTracker, open_tracker
from flows.tracking.models import Checkpoint
from flows.tracking.records import HEALTH, Record, read_steps
from flows.tracking.sync import recorded, send_all
from stages.lib.core.files import write_json, write_jsonl, write_text
from stages.ppo.common.outputs import describe_rows
from tests.paths import ROOT
from tests.servers import NOWHERE

DOCS = ROOT / "docs/running.md"
ADDRESSES = {"pipeline", "assets", "prepare@r0", "sft@r0", "gate_sft@r0", "evaluate@r0"}


def run_all(tracker: MlflowTracker) -> None:
    tracker.begin()
    for address in dvc_stages.stage_order(["r0"]):
        tracker.start(address, Meter())
        outcome = dvc_stages.run(address, lambda _: None)
        tracker.finish(outcome.value)
    tracker.close("FINISHED", {"summary.md": "the table"})


def runs(database: str, run: str) -> dict[str, Run]:
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("rondo")
    assert experiment is not None
    matches = client.search_runs([experiment.experiment_id], f"tags.`rondo.run` = '{run}'")
    return {match.data.tags["rondo.address"]: match for match in matches}


def test_a_run_is_mirrored_with_its_times_data_samples_and_checkpoints(
    project: Path, shared_database: str
) -> None:
    messages: list[str] = []
    run_all(
        MlflowTracker("full", shared_database, project / ".rondo", {"seed": "0"}, messages.append)
    )
    assert messages == []
    by_address, client = runs(shared_database, "full"), MlflowClient(shared_database)
    assert set(by_address) == ADDRESSES
    parent, sft, evaluate = (by_address[name] for name in ("pipeline", "sft@r0", "evaluate@r0"))
    assert parent.info.status == sft.info.status == "FINISHED"
    assert sft.data.tags["mlflow.parentRunId"] == parent.info.run_id
    tags = [sft.data.tags[name] for name in ("stage", "round", "dvc", "seed")]
    assert tags == ["sft", "r0", "ran", "0"]
    assert sft.data.params["sft.lora.r"] == "16"
    assert curve(client, sft.info.run_id, "loss") == [
        (1, 1.0, 1001000),
        (2, 0.5, 1002000),
        (3, 1 / 3, 1003000),
    ]
    assert sft.data.metrics["final/loss_after"] == 4.67
    assert "final/ppo/judge_score" in evaluate.data.metrics
    assert not [key for key in evaluate.data.metrics if "step_" in key]
    (data,) = [entry.dataset for entry in sft.inputs.dataset_inputs]
    outs = {out["path"]: out["md5"] for out in read_lock("prepare@r0")["outs"]}
    assert data.name == "rounds/r0/prepare/data" and data.digest == outs[data.name]
    table = json.loads(client_text(client, sft, "samples.json"))
    assert table["columns"] == ["id", "prompt", "base", "sft"]
    models = {
        model.name: model for model in client.search_logged_models([parent.info.experiment_id])
    }
    assert set(models) == {"r0-base", "r0-sft", "r0-ppo", "r0-step_00009", "r0-step_00018"}
    assert search_of_the_docs(shared_database) == ["r0-ppo", "r0-step_00009"]
    best = client.search_logged_models(
        [parent.info.experiment_id],
        order_by=[{"field_name": "metrics.judge_score", "ascending": False}],
    )
    assert [model.name for model in best][:4] == ["r0-ppo", "r0-step_00009", "r0-sft", "r0-base"]
    # A model is an output of the stage that made it; here no stage made the policies.
    made_by = {name: model.source_run_id for name, model in models.items()}
    assert made_by["r0-base"] == by_address["assets"].info.run_id
    assert made_by["r0-sft"] == sft.info.run_id
    assert made_by["r0-ppo"] == made_by["r0-step_00009"] == evaluate.info.run_id
    inputs = client.get_run(evaluate.info.run_id).inputs.model_inputs
    evaluated = {model.model_id for model in inputs}
    assert evaluated == {models[name].model_id for name in ("r0-base", "r0-sft")}
    (data_set,) = {metric.dataset_name for metric in models["r0-sft"].metrics}
    assert data_set is None  # this evaluation read no data set

    run_all(MlflowTracker("again", shared_database, project / ".rondo", {}, messages.append))
    assert {
        run.data.tags["dvc"]
        for name, run in runs(shared_database, "again").items()
        if name != "pipeline"
    } == {"unchanged"}
    assert runs(shared_database, "again")["sft@r0"].data.metrics["final/loss_after"] == 4.67


def test_metrics_of_models_name_the_data_on_which_they_were_measured(shared_database: str) -> None:
    store, client = MlflowStore(shared_database, True), MlflowClient(shared_database)
    store.send(
        Record(
            run="data",
            address="evaluate@r0",
            started=0,
            ended=1,
            inputs={"rounds/r0/prepare/data": "d1"},
            checkpoints=[
                Checkpoint(name=name, stage="ppo", path=name, digest=name, metrics={"kl": 1.0})
                for name in ("r0-ppo", "r0-step_00009")
            ],
        )
    )
    run = runs(shared_database, "data")["evaluate@r0"]
    data = {(entry.dataset.name, entry.dataset.digest) for entry in run.inputs.dataset_inputs}
    assert data == {("rounds/r0/prepare/data", "d1"), ("eval", "d1")}
    for output in client.get_run(run.info.run_id).outputs.model_outputs:
        (metric,) = client.get_logged_model(output.model_id).metrics
        assert (metric.dataset_name, metric.dataset_digest) == ("eval", "d1")


def search_of_the_docs(database: str) -> list[str]:
    """Run the Python block of docs/running.md in this database; names of the models it returns."""
    uri = "sqlite:///.rondo/mlflow.db"
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if uri in block]
    variables: dict[str, Any] = {}
    exec(block.replace(uri, database), variables)
    (models,) = [value for value in variables.values() if isinstance(value, DataFrame)]
    return list(models["name"])


@pytest.mark.parametrize("before", [None, "sqlite:///mine.db"])
def test_a_tracker_leaves_the_environment_variable_as_it_is(
    project: Path, shared_database: str, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """MLflow itself sets it, which would redirect the records of later processes."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if before:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", before)
    tracker = MlflowTracker("environment", shared_database, project / ".rondo", {}, print)
    tracker.begin()
    tracker.flush()
    assert os.environ.get("MLFLOW_TRACKING_URI") == before


def client_text(client: MlflowClient, run: Run, name: str) -> str:
    return Path(client.download_artifacts(run.info.run_id, name)).read_text()


def test_what_a_dead_server_missed_is_sent_later_unchanged(
    finished_project: Path, shared_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    home = finished_project / ".rondo"
    run_all(MlflowTracker("offline", NOWHERE, home, {}, messages.append, local=False))
    assert len(messages) == 2
    assert NOWHERE in messages[0] and "`rondo sync` sends the rest" in messages[1]
    steps = finished_project / "rounds/r0/sft/metrics.jsonl"
    steps.write_text(steps.read_text().replace("1.0", "9.0"))  # a later run has other numbers

    tracker = MlflowTracker("next", shared_database, home, {}, pytest.fail)
    tracker.begin()
    tracker.flush()
    sent = runs(shared_database, "offline")
    assert set(sent) == ADDRESSES
    assert sent["pipeline"].info.status == "FINISHED"
    history = MlflowClient(shared_database).get_metric_history(sent["sft@r0"].info.run_id, "loss")
    assert [point.value for point in history] == [1.0, 0.5, 1 / 3]
    tracker.close("FINISHED", {})


def contents(database: str, run: str) -> dict[str, object]:
    """All that MLflow has of a pipeline run, without MLflow's own ids and times."""
    client, content = MlflowClient(database), dict[str, object]()
    for address, part in runs(database, run).items():
        run_id, info = part.info.run_id, part.info
        content[address] = [
            (info.run_name, info.status, info.start_time, info.end_time, part.data.params),
            own_tags(part.data.tags),
            {key: curve(client, run_id, key) for key in part.data.metrics},
            [(file.path, file.file_size) for file in client.list_artifacts(run_id)],
            sorted((data.dataset.name, data.dataset.digest) for data in part.inputs.dataset_inputs),
            sorted(names(client, part.inputs.model_inputs)),
            sorted(names(client, part.outputs.model_outputs)),
        ]
    for model in client.search_logged_models(["1"], f"tags.`rondo.run` = '{run}'"):
        metrics = sorted((metric.key, metric.value) for metric in model.metrics or [])
        content[model.name] = [model.status, model.params, own_tags(model.tags), metrics]
    return content


def own_tags(tags: dict[str, str]) -> dict[str, str]:
    ignored = ("mlflow.", "rondo.record")
    return {key: value for key, value in tags.items() if not key.startswith(ignored)}


def names(client: MlflowClient, models: list[Any]) -> list[str]:
    return [str(client.get_logged_model(model.model_id).name) for model in models]


def test_syncing_again_changes_nothing_and_fills_another_mlflow(
    finished_project: Path,
    shared_database: str,
    empty_tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = finished_project / ".rondo"
    run_all(MlflowTracker("twice", shared_database, home, {"project": "p"}, pytest.fail))
    before = contents(shared_database, "twice")
    assert len(before) == len(ADDRESSES) + 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_database)
    assert list(send_all(home, pytest.fail)) == []
    files = sorted(recorded(home)[0].glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:  # another hash of the same content: sent again
        file.write_text(file.read_text() + "\n")
    assert list(send_all(home, pytest.fail)) == ["twice: 6 records"]
    assert contents(shared_database, "twice") == before

    (tmp_path / "other").mkdir()
    new = f"sqlite:///{shutil.copy(empty_tables, tmp_path / 'other/mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new)
    assert list(send_all(home, pytest.fail)) == ["twice: 6 records"]
    assert contents(new, "twice") == before


def test_the_pipeline_run_has_the_health_of_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_database: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for round_, kls in (("r0", (0.5, 3.0, 6.0)), ("r1", (0.25, 2.0))):
        rows = [
            {"step": step, "kl": kl, "entropy": 2.0, "kl_coef": 0.1}
            for step, kl in enumerate(kls, 1)
        ]
        write_jsonl(Path(f"rounds/{round_}/ppo/metrics.jsonl"), rows)
        write_jsonl(
            Path(f".rondo/work/{round_}/ppo/clock.jsonl"),
            [{"step": n, "time": 1000.0 + n} for n in (-1, *range(1, len(kls) + 1))],
        )
    write_jsonl(Path("rounds/r0/sft/metrics.jsonl"), [{"step": 1, "entropy": 1.0}])
    tracker = MlflowTracker("health", shared_database, tmp_path / ".rondo", {}, pytest.fail)
    client, live = MlflowClient(shared_database), []
    for address in ("sft@r0", "ppo@r0", "ppo@r1"):
        meter = Meter()
        meter.began = 0.0
        tracker.start(address, meter)
        tracker.flush()
        parent = runs(shared_database, "health")["pipeline"].info
        live = live or curve(client, parent.run_id, "r0/kl")
        tracker.finish("failed")
    tracker.close("FINISHED", {"summary.md": "the table"})
    assert (
        live
        == curve(client, parent.run_id, "r0/kl")
        == [(1, 0.5, 1001000), (2, 3.0, 1002000), (3, 6.0, 1003000)]
    )
    assert curve(client, parent.run_id, "r1/kl") == [(1, 0.25, 1001000), (2, 2.0, 1002000)]
    after = client.get_run(parent.run_id)
    assert after.info.status == "FINISHED"
    assert set(after.data.metrics) == {"r0/kl", "r0/entropy", "r1/kl", "r1/entropy"}


def curve(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float, int]]:
    return [
        (point.step, point.value, point.timestamp)
        for point in client.get_metric_history(run_id, key)
    ]


def test_ppo_measures_its_health_metrics() -> None:
    row = {
        "score": 0.0,
        "kl": 0.0,
        "length": 2,
        "finish_reason": "stop",
        "response": "Fine day",
        "judge_score": 0.5,
    }
    # entropy comes from the tensors of the rollout, not from its rows
    assert set(HEALTH) - {"entropy"} <= describe_rows([row], 2.0).keys()


def test_steps_without_a_clock_get_the_current_time(project: Path) -> None:
    folder = project / "rounds/r0/sft"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "note": "x"}\n{"step": 2, "loss": 1.5}\n'
    )
    before = records.milliseconds()
    steps = records.read_steps("sft@r0")
    assert [(step.key, step.value, step.step) for step in steps] == [
        ("loss", 2.0, 1),
        ("loss", 1.5, 2),
    ]
    assert all(before <= step.time <= records.milliseconds() for step in steps)
    assert [step.step for step in records.read_steps("sft@r0", 1)] == [2]


def test_switched_off(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    tracker = open_tracker("off", project / ".rondo", {}, pytest.fail)
    tracker.begin()
    tracker.start("sft@r0", Meter())
    tracker.finish("ran")
    assert tracker.page() is None
    tracker.close("FINISHED", {})
    assert not (project / ".rondo").exists()


def test_the_pages_of_prepare_are_mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data.json", "data.html"):
        write_text(Path("reports/r0") / name, f"of {name}")
    assert records.read_record("run", "prepare@r0", "ran", {}).texts == {
        "data.json": "of data.json",
        "data.html": "of data.html",
    }


def test_the_approver_of_a_gate_and_the_reason_are_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    approval = {
        "approved": True,
        "by": "Ada",
        "reason": "seen by hand",
        "failed": {"sft.memorised": 0.1},
    }
    verdict = {
        "gate": "sft",
        "round": "r0",
        "passed": False,
        "may_continue": True,
        "policy": "ask",
        "approval": approval,
        "checks": [],
    }
    write_json(Path("reports/r0/gate_sft.json"), verdict)
    record = records.read_record("run", "gate_sft@r0", "ran", {})
    assert json.loads(record.texts["gate_sft.json"]) == verdict
    tags = {
        "passed": "False",
        "may_continue": "True",
        "policy": "ask",
        "approval.approved": "True",
        "approval.by": "Ada",
        "approval.reason": "seen by hand",
    }
    assert record.tags.items() >= tags.items()


def test_a_step_that_is_being_written_is_left_for_later(project: Path) -> None:
    folder, clock = project / "rounds/r0/sft", project / ".rondo/work/r0/sft/clock.jsonl"
    write_text(folder / "metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    write_text(clock, '{"step": -1, "time": 9.0}\n{"step": 1, "time": 10.0}\n')
    assert [(step.value, step.time) for step in read_steps("sft@r0")] == [(2.0, 10000)]
    # the second step is complete, but not yet on the clock
    write_text(folder / "metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert [(step.value, step.time) for step in read_steps("sft@r0")] == [(2.0, 10000)]
