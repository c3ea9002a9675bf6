"""Records of stages, and how they reach a real MLflow database, late if its server was dead."""

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
from flows.core.services import Servers
from flows.execution import dvc_stages
from flows.execution.meter import Meter
from flows.tracking.mlflow_store import MlflowStore, store_uri
from flows.tracking.mlflow_tracker import MlflowTracker, recorded, send_all
from flows.tracking.records import (
    HEALTH,
    Checkpoint,
    Record,
    milliseconds,
    read_record,
    read_steps,
)
from stages.lib.core.files import write_json, write_jsonl, write_text
from stages.ppo.common.outputs import describe_rows
from tests.paths import ROOT
from tests.servers import NOWHERE

DOCS = ROOT / "docs/running.md"
ADDRESSES = {"pipeline", "assets", "prepare@r0", "sft@r0", "gate_sft@r0", "evaluate@r0"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def curve(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float, int]]:
    return [
        (point.step, point.value, point.timestamp)
        for point in client.get_metric_history(run_id, key)
    ]


def search_of_the_docs(database: str) -> list[str]:
    """Run the Python block of docs/running.md in this database; names of the models it returns."""
    uri = "sqlite:///.rondo/mlflow.db"
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if uri in block]
    variables: dict[str, Any] = {}
    exec(block.replace(uri, database), variables)
    (models,) = [value for value in variables.values() if isinstance(value, DataFrame)]
    return list(models["name"])


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


def test_a_run_is_mirrored_and_syncing_again_changes_nothing_and_fills_another_mlflow(
    project: Path,
    shared_database: str,
    empty_tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, tags = project / ".rondo", {"seed": "0", "project": "p"}
    tracker = MlflowTracker("full", shared_database, home, tags, pytest.fail)
    run_all(tracker)
    by_address, client = runs(shared_database, "full"), MlflowClient(shared_database)
    check_stages(client, by_address)
    check_models(shared_database, by_address)
    [parent, sft] = (by_address[name].info for name in ("pipeline", "sft@r0"))
    page = f"/#/experiments/{parent.experiment_id}/runs/{sft.run_id}"
    assert tracker.page("sft@r0") == f"{Servers().mlflow}{page}?workflowType=machine_learning"
    assert tracker.page("reward@r0") is None

    before = contents(shared_database, "full")
    assert len(before) == len(ADDRESSES) + 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_database)
    assert list(send_all(home, pytest.fail)) == []
    files = sorted(recorded(home)[0].glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:  # another hash of the same content: sent again
        file.write_text(file.read_text() + "\n")
    assert list(send_all(home, pytest.fail)) == ["full: 6 records"]
    assert contents(shared_database, "full") == before
    (tmp_path / "other").mkdir()
    new = f"sqlite:///{shutil.copy(empty_tables, tmp_path / 'other/mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new)
    assert list(send_all(home, pytest.fail)) == ["full: 6 records"]
    assert contents(new, "full") == before


def check_stages(client: MlflowClient, by_address: dict[str, Run]) -> None:
    assert set(by_address) == ADDRESSES
    parent, sft, evaluate = (by_address[name] for name in ("pipeline", "sft@r0", "evaluate@r0"))
    assert parent.info.status == sft.info.status == "FINISHED"
    assert sft.data.tags["mlflow.parentRunId"] == parent.info.run_id
    tags = [sft.data.tags[name] for name in ("stage", "round", "dvc", "seed")]
    assert tags == ["sft", "r0", "ran", "0"]
    assert sft.data.params["sft.lora.r"] == "16"
    points = [(1, 1.0, 1001000), (2, 0.5, 1002000), (3, 1 / 3, 1003000)]
    assert curve(client, sft.info.run_id, "loss") == points
    assert sft.data.metrics["final/loss_after"] == 4.67
    assert "final/ppo/judge_score" in evaluate.data.metrics
    assert not [key for key in evaluate.data.metrics if "step_" in key]
    (data,) = [entry.dataset for entry in sft.inputs.dataset_inputs]
    outs = {out["path"]: out["md5"] for out in read_lock("prepare@r0")["outs"]}
    assert data.name == "rounds/r0/prepare/data" and data.digest == outs[data.name]
    table = Path(client.download_artifacts(sft.info.run_id, "samples.json")).read_text()
    assert json.loads(table)["columns"] == ["id", "prompt", "base", "sft"]


def check_models(database: str, by_address: dict[str, Run]) -> None:
    client, evaluate = MlflowClient(database), by_address["evaluate@r0"]
    best_first = client.search_logged_models(
        [evaluate.info.experiment_id],
        order_by=[{"field_name": "metrics.judge_score", "ascending": False}],
    )
    models = {str(model.name): model for model in best_first}
    assert list(models)[:4] == ["r0-ppo", "r0-step_00009", "r0-sft", "r0-base"]
    assert set(models) == {"r0-base", "r0-sft", "r0-ppo", "r0-step_00009", "r0-step_00018"}
    assert search_of_the_docs(database) == ["r0-ppo", "r0-step_00009"]
    # A model is an output of the stage that made it; here no stage made the policies.
    made_by = {name: model.source_run_id for name, model in models.items()}
    assert made_by["r0-base"] == by_address["assets"].info.run_id
    assert made_by["r0-sft"] == by_address["sft@r0"].info.run_id
    assert made_by["r0-ppo"] == made_by["r0-step_00009"] == evaluate.info.run_id
    inputs = client.get_run(evaluate.info.run_id).inputs.model_inputs
    assert {*names(client, inputs)} == {"r0-base", "r0-sft"}
    (data_set,) = {metric.dataset_name for metric in models["r0-sft"].metrics or []}
    assert data_set is None  # this evaluation read no data set


def test_metrics_of_models_name_the_data_on_which_they_were_measured(shared_database: str) -> None:
    store, client = MlflowStore(shared_database), MlflowClient(shared_database)
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


def test_what_a_dead_server_missed_is_sent_later_unchanged(
    finished_project: Path, shared_database: str
) -> None:
    messages: list[str] = []
    home = finished_project / ".rondo"
    run_all(MlflowTracker("offline", NOWHERE, home, {}, messages.append))
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
    assert {run.data.tags.get("dvc") for run in sent.values()} == {None, "unchanged"}
    history = MlflowClient(shared_database).get_metric_history(sent["sft@r0"].info.run_id, "loss")
    assert [point.value for point in history] == [1.0, 0.5, 1 / 3]
    assert sent["sft@r0"].data.metrics["final/loss_after"] == 4.67
    tracker.close("FINISHED", {})


@pytest.mark.parametrize("before", [None, "sqlite:///mine.db"])
def test_the_pipeline_run_has_the_health_of_each_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shared_database: str, before: str | None
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if before:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", before)
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
    run = f"health {before is None}"
    tracker = MlflowTracker(run, shared_database, folder / ".rondo", {}, pytest.fail)
    client, live = MlflowClient(shared_database), []
    for address in ("sft@r0", "ppo@r0", "ppo@r1"):
        meter = Meter()
        meter.began = 0.0
        tracker.start(address, meter)
        tracker.flush()
        parent = runs(shared_database, run)["pipeline"].info
        live = live or curve(client, parent.run_id, "r0/kl")
        tracker.finish("failed")
    tracker.close("FINISHED", {"summary.md": "the table"})
    points = [(1, 0.5, 1001000), (2, 3.0, 1002000), (3, 6.0, 1003000)]
    assert live == curve(client, parent.run_id, "r0/kl") == points
    assert curve(client, parent.run_id, "r1/kl") == [(1, 0.25, 1001000), (2, 2.0, 1002000)]
    after = client.get_run(parent.run_id)
    assert after.info.status == "FINISHED"
    assert set(after.data.metrics) == {"r0/kl", "r0/entropy", "r1/kl", "r1/entropy"}
    # MLflow itself sets the variable, which would redirect the records of later processes
    assert os.environ.get("MLFLOW_TRACKING_URI") == before


def test_ppo_measures_its_health_metrics() -> None:
    row = {"score": 0.0, "kl": 0.0, "length": 2, "finish_reason": "stop"}
    row |= {"response": "Fine day", "judge_score": 0.5}
    # entropy comes from the tensors of the rollout, not from its rows
    assert set(HEALTH) - {"entropy"} <= describe_rows([row], 2.0).keys()


def test_steps_and_their_times(folder: Path) -> None:
    metrics, clock = Path("rounds/r0/sft/metrics.jsonl"), Path(".rondo/work/r0/sft/clock.jsonl")
    both = '{"step": 1, "loss": 2.0, "note": "x"}\n{"step": 2, "loss": 1.0}\n'
    write_text(metrics, both)
    before = milliseconds()
    steps = read_steps("sft@r0")  # it ran on another machine: they get the current time
    assert [(step.key, step.value, step.step) for step in steps] == [
        ("loss", 2.0, 1),
        ("loss", 1.0, 2),
    ]
    assert all(before <= step.time <= milliseconds() for step in steps)
    assert [step.step for step in read_steps("sft@r0", 1)] == [2]
    write_text(clock, '{"step": -1, "time": 9.0}\n{"step": 7, "time": 10.0}\n')  # of another run
    assert all(before <= step.time <= milliseconds() for step in read_steps("sft@r0"))
    # A step that is being written is left for later, and one that is not yet on the clock.
    write_text(clock, '{"step": -1, "time": 9.0}\n{"step": 1, "time": 10.0}\n')
    assert [(step.value, step.time) for step in read_steps("sft@r0")] == [(2.0, 10000)]
    write_text(metrics, both[:-10])
    assert [(step.value, step.time) for step in read_steps("sft@r0")] == [(2.0, 10000)]


def test_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    tracker = MlflowTracker("off", store_uri(folder), folder / ".rondo", {}, pytest.fail)
    tracker.begin()
    tracker.start("sft@r0", Meter())
    tracker.finish("ran")
    assert tracker.page() is None
    tracker.close("FINISHED", {})
    assert not (folder / ".rondo").exists()


def test_the_pages_of_prepare_and_the_approver_of_a_gate_are_recorded(folder: Path) -> None:
    for name in ("data.json", "data.html"):
        write_text(Path("reports/r0") / name, f"of {name}")
    texts = read_record("run", "prepare@r0", "ran", {}).texts
    assert texts == {name: f"of {name}" for name in ("data.json", "data.html")}
    decision = {"approved": True, "by": "Ada", "reason": "seen by hand"}
    verdict = {
        **{"gate": "sft", "round": "r0", "passed": False, "may_continue": True, "policy": "ask"},
        "approval": decision | {"failed": {"sft.memorised": 0.1}},
        "checks": [],
    }
    write_json(Path("reports/r0/gate_sft.json"), verdict)
    record = read_record("run", "gate_sft@r0", "ran", {})
    assert json.loads(record.texts["gate_sft.json"]) == verdict
    tags = {"passed": "False", "may_continue": "True", "policy": "ask"}
    tags |= {f"approval.{key}": str(value) for key, value in decision.items()}
    assert record.tags.items() >= tags.items()
