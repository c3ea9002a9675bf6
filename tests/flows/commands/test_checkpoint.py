"""`evaluate-checkpoint` in a real MLflow database and on a real Prefect server; tests/stages tests
the evaluation itself.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from prefect.client.orchestration import SyncPrefectClient

from flows import cli
from flows.commands.checkpoint import ROWS, evaluate_checkpoint, record
from flows.execution.meter import Meter
from flows.orchestration.concurrency import LIMIT, compute_slot
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.records import lineage
from stages.lib.core.errors import BadInput, Unreachable
from stages.lib.core.files import write_json, write_jsonl, write_text
from stages.lib.core.params import check_params
from tests.servers import NOWHERE, request

STEP = "rounds/r0/ppo/checkpoints/step_00009"
HASH = "5ea1ab1e" * 8
WON = {
    "win_rate_sft": 0.9,
    "win_rate_sft_low": 0.85,
    "win_rate_sft_high": 0.95,
    "win_rate_ppo": 0.5,
    "win_rate_ppo_low": 0.4,
    "win_rate_ppo_high": 0.6,
}


@pytest.fixture
def folder(
    built_once: Callable[..., Path],
    tmp_path: Path,
    shared_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A project whose PPO is up to date, as working directory."""
    shutil.copytree(built_once("ppo_project", run_ppo), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_database)
    return tmp_path


def run_ppo(folder: Path) -> None:
    """A git and DVC project in this folder whose PPO has run."""
    params = check_params({"mlflow": {"upload": []}}, "test")  # there is no SFT model
    (folder / "params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    (folder / ".gitignore").write_text("/rounds\n")
    make = (
        f"import pathlib; path = pathlib.Path('{STEP}'); path.mkdir(parents=True); "
        "(path / 'adapter.bin').write_text('9'); (path / 'adapter_config.json').write_text('{}')"
    )
    ppo = {"cmd": f'{sys.executable} -c "{make}"', "outs": ["rounds/${key}/ppo/checkpoints"]}
    (folder / "dvc.yaml").write_text(
        yaml.safe_dump({"stages": {"ppo": {"foreach": {"r0": None}, "do": ppo}}})
    )
    for command in (
        ["git", "init", "-q"],
        [sys.executable, "-m", "dvc", "init", "-q"],
        [sys.executable, "-m", "dvc", "repro", "-q"],
    ):
        subprocess.run(command, cwd=folder, check=True)


def write_report(path: str = STEP, evaluation: str = "e1") -> Path:
    """The files that stages/evaluate/checkpoint.py writes."""
    report = Path(f"reports/r0/checkpoint_{Path(path).name}_{HASH[:8]}.json")
    models = {
        "sft": {"kl": 0.0},
        "ppo": {"kl": 5.0},
        "checkpoint": {"kl": 6.5, "kl_per_token": 0.5, "judge_score": 0.75},
    }
    write_json(
        report,
        {"round": "r0", "path": path, "hash": HASH, "evaluation_id": evaluation, **models, **WON},
    )
    write_jsonl(report.with_suffix(".jsonl"), [{"id": "1", "sample": 0, "checkpoint": "Fine!"}])
    return report


def models(database: str, run: str) -> list[LoggedModel]:
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("rondo")
    assert experiment is not None
    return list(
        client.search_logged_models([experiment.experiment_id], f"tags.`rondo.run` = '{run}'")
    )


def numbers(model: LoggedModel) -> dict[str, Any]:
    return {metric.key: metric.value for metric in model.metrics or []}


def test_a_checkpoint_is_a_run_with_a_model_that_rondo_best_finds(
    folder: Path, shared_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time nothing is added
        record("", write_report(), folder / ".rondo", pytest.fail, Meter())
    (model,) = models(shared_database, folder.name)
    assert numbers(model) == {
        "kl": 6.5,
        "kl_per_token": 0.5,
        "judge_score": 0.75,
        "win_rate": 0.9,
        "win_rate_low": 0.85,
        "win_rate_high": 0.95,
    }
    (out,) = yaml.safe_load(Path("dvc.lock").read_text())["stages"]["ppo@r0"]["outs"]
    wanted = {"stage": "ppo", "round": "r0", "evaluation_id": "e1", "seed": "0", "md5": out["md5"]}
    wanted["lineage"] = lineage("r0", "e1")
    assert model.tags.items() >= wanted.items()
    assert (model.name, model.params["path"], model.params["step"]) == ("r0-step_00009", STEP, "9")
    client = MlflowClient(shared_database)
    run = client.get_run(model.source_run_id)
    assert (
        run.data.tags.items()
        >= {"stage": "checkpoint", "round": "r0", "path": STEP, "rondo.run": folder.name}.items()
    )
    assert (
        run.data.metrics["final/win_rate_ppo"] == 0.5
        and run.data.metrics["final/checkpoint/kl"] == 6.5
    )
    assert json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text())[
        "data"
    ] == [["1", 0, "Fine!"]]
    assert (
        run.info.status
        == client.get_run(run.data.tags["mlflow.parentRunId"]).info.status
        == "FINISHED"
    )

    record("", write_report(evaluation="e2"), folder / ".rondo", pytest.fail, Meter())
    assert {model.tags["evaluation_id"] for model in models(shared_database, folder.name)} == {
        "e1",
        "e2",
    }
    with pytest.raises(SystemExit):
        cli.main(["best", "--kl", "0.6"])
    assert (
        f"{folder.name}:r0, win rate 0.900 [0.850, 0.950]; its weights are in {STEP}"
        in capsys.readouterr().out
    )


def test_in_a_workspace_it_belongs_to_the_run_whose_status_stays(
    folder: Path, shared_database: str
) -> None:
    tracker = MlflowTracker(
        "own", shared_database, folder / ".rondo", {"preset": "tiny"}, pytest.fail
    )
    tracker.begin()
    tracker.close("FAILED", {"summary.md": "the table"})
    write_text(Path(STEP) / "adapter.bin", "another than dvc.lock's")
    record("own", write_report(), folder / ".rondo", pytest.fail, Meter())
    (model,) = models(shared_database, "own")
    assert model.tags["md5"] == HASH
    client = MlflowClient(shared_database)
    parent = client.get_run(client.get_run(model.source_run_id).data.tags["mlflow.parentRunId"])
    assert (parent.data.tags["rondo.run"], parent.data.tags["preset"], parent.info.status) == (
        "own",
        "tiny",
        "FAILED",
    )


def test_an_adapter_from_elsewhere_has_a_name_that_mlflow_takes(
    folder: Path, shared_database: str
) -> None:
    record("", write_report("/models/it's v1.2"), folder / ".rondo", pytest.fail, Meter())
    (model,) = models(shared_database, folder.name)
    assert (model.name, model.tags["md5"]) == ("r0-it_s_v1_2", HASH)


def test_mlflow_that_is_down_gets_it_later(
    folder: Path, shared_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with monkeypatch.context() as down:
        down.setenv("MLFLOW_TRACKING_URI", NOWHERE)
        record("", write_report(), folder / ".rondo", lines.append, Meter())
    assert len(lines) == 2 and NOWHERE in lines[0] and "`rondo sync` sends the rest" in lines[1]
    tracker = MlflowTracker("next", shared_database, folder / ".rondo", {}, pytest.fail)
    tracker.begin()
    tracker.flush()
    assert [model.name for model in models(shared_database, folder.name)] == ["r0-step_00009"]


STAGE = """
import pathlib, sys
assert sys.argv[1:4] == ["--round", "r0", "--checkpoint"]
if sys.argv[4] == "far":
    print("checkpoint@r0: Unreachable: no answer", file=sys.stderr)
    sys.exit(4)
print("[checkpoint@r0] step 1/3", flush=True)
print(*pathlib.Path("reports/r0").glob(f"checkpoint_{sys.argv[4]}_*.json"))
"""


def stand_in_for_the_stage(folder: Path) -> None:
    """A few lines for stages.evaluate.checkpoint, and the report that they print."""
    for name, text in (("__init__", ""), ("checkpoint", STAGE)):
        write_text(folder / f"stages/evaluate/{name}.py", text)
    write_text(folder / "stages/__init__.py", "")
    with chdir(folder):
        report = write_report()
        results = json.loads(report.read_text())
        complete = {
            model: dict.fromkeys(ROWS, 0.0) | results[model]
            for model in ("sft", "ppo", "checkpoint")
        }
        write_json(report, results | complete)


def test_the_flow_evaluates_records_and_shows_a_checkpoint_of_the_project_or_of_a_run(
    folder: Path,
    shared_database: str,
    api: str,
    prefect: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_database)
    workspace = folder / ".rondo/workspaces/one"
    shutil.copytree(folder, workspace)
    for run, working_folder, parent in (("", folder, folder.name), ("one", workspace, "one")):
        stand_in_for_the_stage(working_folder)
        state = evaluate_checkpoint(run, "r0", "step_00009", return_state=True)
        assert str(state.message).startswith(
            "win rate against SFT 0.900 [0.850, 0.950], "
            "against the selected policy 0.500 [0.400, 0.600]; "
            f"all results: {working_folder}/reports/r0/"
        )
        [model] = models(shared_database, parent)
        assert numbers(model)["kl"] == 6.5
    key = {"key": {"any_": ["checkpoint-r0-step-00009"]}}
    [shown] = request(f"{api}/artifacts/latest/filter", {"artifacts": key})
    row = {"": "kl", "sft": 0.0, "ppo": 5.0, "checkpoint": 6.5}
    assert row in json.loads(shown["data"])


def test_the_flow_fails_at_once_if_a_server_is_unreachable_or_the_run_has_no_folder(
    folder: Path, prefect: SyncPrefectClient
) -> None:
    stand_in_for_the_stage(folder)
    (folder / ".rondo/workspaces").mkdir(parents=True)
    Path("far").mkdir()
    Path("far/adapter_config.json").touch()
    for run, checkpoint, error, message in (
        ("", "far", Unreachable, "Unreachable: no answer"),
        ("none", "far", BadInput, "is not a folder"),
    ):
        state = evaluate_checkpoint(run, "r0", checkpoint, return_state=True)
        assert state.is_failed() and message in str(state.message)
        assert isinstance(state.result(raise_on_failure=False), error)


def test_a_checkpoint_or_round_that_is_not_there_waits_for_no_slot(
    folder: Path, api: str, prefect: SyncPrefectClient
) -> None:
    with compute_slot(pytest.fail):
        pass  # the limit is there
    slot = {"names": [LIMIT], "slots": 1, "mode": "concurrency", "lease_duration": 60}
    lease = request(f"{api}/v2/concurrency_limits/increment-with-lease", slot)["lease_id"]
    for round_, checkpoint, message in (
        ("r0", "step_99999", "rounds/r0/ppo/checkpoints has step_00009"),
        ("r7", "step_00009", "--round r7: not in params.yaml"),
    ):
        state = evaluate_checkpoint("", round_, checkpoint, return_state=True)
        assert state.is_failed() and message in str(state.message)
    request(f"{api}/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
