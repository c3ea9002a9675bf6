"""Which LoggedModels the records of a run make, and which of earlier runs they share."""

from collections.abc import Callable, Sequence

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus

from flows.tracking.mlflow_store import MlflowStore
from flows.tracking.models import Checkpoint, ModelFile
from flows.tracking.records import Record

NAMES = ("r0-ppo", "r0-step_00009")
FILES = [ModelFile(name="a", md5="m", sources=[])]
Send = Callable[..., None]


@pytest.fixture
def send(database: str) -> Send:
    """A function that sends the records of `ppo` and `evaluate`."""
    store = MlflowStore(database, True)

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


def test_a_run_with_nothing_to_do_shares_the_models(database: str, send: Send) -> None:
    send("first", "ran")
    send("second", "unchanged")
    assert made_by(database) == ["first"]
    for address in ("ppo@r0", "evaluate@r0"):
        assert inputs(database, "second", address) == set(NAMES)
    [model, *_] = MlflowClient(database).search_logged_models(["1"], f"name = '{NAMES[0]}'")
    assert [metric.value for metric in model.metrics] == [0.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"project": "two"},
        {"digest": "other"},
        {"evaluation": "other"},
        {"outcome": "ran"},
        {"outcome": "restored"},
    ],
    ids=lambda changes: " ".join(*changes.items()),
)
def test_other_models_are_made(database: str, send: Send, changes: dict[str, str]) -> None:
    send("first", "ran")
    send("second", **{"outcome": "unchanged"} | changes)
    assert made_by(database) == ["first", "second"]


def test_of_two_evaluations_the_model_of_the_same_one_is_shared(database: str, send: Send) -> None:
    send("first", "ran")
    send("second", "unchanged", evaluation="other")
    send("third", "unchanged")
    assert made_by(database) == ["first", "second"]


def test_files_that_mlflow_lacks_need_a_model_of_their_own(database: str, send: Send) -> None:
    send("without files", "ran")
    send("with files", "unchanged", files=FILES)
    send("again", "unchanged", files=FILES)
    assert made_by(database) == ["without files", "with files"]
    client = MlflowClient(database)
    for model in client.search_logged_models(["1"], "tags.`rondo.run` = 'with files'"):
        client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)  # its upload failed
    send("third", "unchanged", files=FILES)
    assert made_by(database) == ["without files", "with files", "third"]
