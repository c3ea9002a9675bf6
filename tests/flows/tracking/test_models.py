"""LoggedModels in a real MLflow database: which ones the records of a run make, which of earlier
runs they share, and whose files MLflow stores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModel

from flows.tracking.mlflow_store import EXPERIMENT, MlflowStore, has_files
from flows.tracking.mlflow_tracker import upload_models
from flows.tracking.records import Checkpoint, ModelFile, Record
from stages.lib.core.params import check_params
from stages.lib.core.params.tracking import Upload
from tests.flows.tracking.tracks import track
from tests.servers import NOWHERE
from tests.stages.conftest import SMALL

NAMES = ("r0-ppo", "r0-step_00009")
FILES = [ModelFile("a", "m", "a")]
MADE = ("sft@r0", "reward@r0", "ppo@r0")
ALL = ("r0-ppo", "r0-reward", "r0-sft", "r0-step_00002", "r0-step_00004")
record = partial(track, outcome="ran", tags={"project": "p"}, upload=tuple(Upload))
Send = Callable[..., None]


@pytest.fixture
def send(database: str) -> Send:
    """A function that sends the records of `ppo` and `evaluate`."""
    store = MlflowStore(database)

    def send(
        run: str,
        outcome: str,
        project: str = "one",
        digest: str = "d",
        evaluation: str = "e",
        files: Sequence[ModelFile] = (),
    ) -> None:
        tags = {"round": "r0", "project": project, "dvc": outcome}
        models = [Checkpoint(name=name, stage="ppo", path=name, digest=digest) for name in NAMES]
        trained = [model.model_copy(update={"files": list(files)}) for model in models]
        made = {"metrics": {"judge_score": 0.5}, "made_by": "ppo@r0"}
        evaluated = [model.model_copy(update=made) for model in models]
        of_run = Record(run=run, started=1, ended=2, tags=tags)
        ppo = {"address": "ppo@r0", "checkpoints": trained}
        store.send(of_run.model_copy(update=ppo))
        evaluate = {"address": "evaluate@r0", "checkpoints": evaluated}
        evaluate["tags"] = tags | {"evaluation_id": evaluation, "lineage": "l"}
        store.send(of_run.model_copy(update=evaluate))

    return send


def made_by(database: str) -> list[str]:
    """The runs that made the LoggedModels of the last policy, in order."""
    models = MlflowClient(database).search_logged_models(
        ["1"], f"name = '{NAMES[0]}'", order_by=[{"field_name": "creation_timestamp"}]
    )
    return [model.tags["rondo.run"] for model in models]


def inputs(database: str, run: str, address: str) -> set[str]:
    """The names of the models that are inputs of a stage's run."""
    client = MlflowClient(database)
    query = f"tags.`rondo.run` = '{run}' and tags.`rondo.address` = '{address}'"
    [of_stage] = client.search_runs(["1"], query)
    used = client.get_run(of_stage.info.run_id).inputs.model_inputs
    return {client.get_logged_model(model.model_id).name for model in used}


def test_runs_with_nothing_to_do_share_the_models_of_the_same_evaluation(
    database: str, send: Send
) -> None:
    send("first", "ran")
    send("second", "unchanged")
    assert made_by(database) == ["first"]
    for address in ("ppo@r0", "evaluate@r0"):
        assert inputs(database, "second", address) == set(NAMES)
    [model, *_] = MlflowClient(database).search_logged_models(["1"], f"name = '{NAMES[0]}'")
    assert [metric.value for metric in model.metrics] == [0.5]
    send("third", "unchanged", evaluation="other")
    send("fourth", "unchanged")
    assert made_by(database) == ["first", "third"]


def test_other_models_are_made(database: str, send: Send) -> None:
    send("first", "ran")
    others = ({"project": "two"}, {"digest": "other"}, {"evaluation": "other"})
    for number, changes in enumerate((*others, {"outcome": "ran"}, {"outcome": "restored"}), 1):
        run = f"run {number}"
        send(run, **{"outcome": "unchanged"} | changes)
        assert made_by(database)[number:] == [run], changes
    send(run, "ran", digest="trained again by the same run")
    assert made_by(database)[number:] == [run, run]


def test_files_that_mlflow_lacks_need_a_model_of_their_own(
    database: str, send: Send, tmp_path: Path
) -> None:
    send("without files", "ran")
    send("with files", "unchanged", files=FILES)
    send("again", "unchanged", files=FILES)
    assert made_by(database) == ["without files", "with files"]
    folder = tmp_path / "recorded/with files"
    folder.mkdir(parents=True)
    messages: list[str] = []
    assert list(upload_models(MlflowStore(database), tmp_path, [folder], messages.append)) == []
    assert len(messages) == 2 and "the files of r0-ppo: its record is gone" in messages[0]
    send("third", "unchanged", files=FILES)
    assert made_by(database) == ["without files", "with files", "third"]


def models_of(uri: str, run: str) -> dict[str, LoggedModel]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    models = client.search_logged_models([experiment.experiment_id], f"tags.`rondo.run` = '{run}'")
    return {str(model.name): model for model in models}


def weights(home: Path) -> list[Path]:
    return sorted((home / "mlartifacts").rglob("*.safetensors"))


def test_only_the_kinds_in_the_settings_are_uploaded(models: Path, home: Path) -> None:
    database, folder = f"sqlite:///{home / 'mlflow.db'}", home.parent
    assert record(database, folder, *MADE, run="none", upload=()) == []
    assert set(models_of(database, "none")) == set(ALL)
    params = Path("params.yaml").read_text()
    whole = check_params(SMALL | {"ppo": SMALL["ppo"] | {"lora": {"r": 0}}}, "test")
    Path("params.yaml").write_text(yaml.safe_dump(whole.model_dump(mode="json")))
    record(database, folder, "sft@r0", run="whole", upload=[Upload.policy])
    assert weights(home) == []  # no adapter needs the SFT model
    Path("params.yaml").write_text(params)
    record(database, folder, *MADE, run="policy", upload=[Upload.policy])
    with_files = {name for name, one in models_of(database, "policy").items() if has_files(one)}
    assert with_files == {"r0-ppo", "r0-sft"}  # the policy is an adapter
    assert len(weights(home)) == 2


def test_files_are_sent_after_an_outage_though_the_folder_has_another_model(
    models: Path, home: Path
) -> None:
    """But one that is damaged in DVC's cache; it holds up no other. No file is stored twice,
    nor after `dvc gc`, which removes the list of the files.
    """
    database, folder = f"sqlite:///{home / 'mlflow.db'}", home.parent
    assert "`rondo sync` sends the rest" in record(NOWHERE, folder, *MADE, run="first")[-1]
    for path in models.glob("rounds/**/*.safetensors"):
        path.write_bytes(b"another model")
    for path in (models / ".dvc/cache").rglob("*"):
        if path.is_file() and b"score.weight" in path.read_bytes()[:10_000]:
            path.unlink()
            path.write_bytes(b"damaged")
    (message,) = record(database, folder, run="next")
    assert "does not get the files of r0-reward" in message and "run its stage again" in message
    statuses = {name: model.status for name, model in models_of(database, "first").items()}
    assert statuses == dict.fromkeys(ALL, "READY") | {"r0-reward": "FAILED"}
    before = weights(home)
    assert len(before) == 4  # SFT, policy, two checkpoints
    unchanged = ("sft@r0", "ppo@r0")
    assert record(database, folder, *unchanged, run="later", outcome="unchanged") == []
    assert weights(home) == before and not models_of(database, "later")
    for path in (models / ".dvc/cache").rglob("*.dir"):
        path.unlink()
    assert record(database, folder, "sft@r0", run="collected") == []
    (model,) = models_of(database, "collected").values()
    assert model.status == "READY" and not has_files(model)
    assert "`dvc gc` removed rounds/r0/sft/model" in model.tags["mlflow.note.content"]
