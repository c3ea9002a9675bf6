"""LoggedModels: MLflow's entries of the models that a stage made or evaluated.

A stage that runs, or is restored from DVC's cache, gets entries of its own, in the order in which
the project got the models. A stage that is unchanged shares those of an earlier run.
"""

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from flows.tracking.model_upload import DIGEST
from flows.tracking.models import Checkpoint
from flows.tracking.provenance import PROJECT
from flows.tracking.records import Record

EVALUATION = ("evaluation_id", "lineage")  # tags of a record, for the models of its evaluation
MODEL_TAGS = ("round", "seed", "revision", "preset", PROJECT)  # of a record, for its models


def model_of_run(
    client: MlflowClient, experiment: str, run_id: str, name: str
) -> LoggedModel | None:
    """The LoggedModel with this name that a run made."""
    query = f"name = '{name}' AND source_run_id = '{run_id}'"
    return next(iter(client.search_logged_models([experiment], query)), None)


def earlier_model(
    client: MlflowClient, experiment: str, record: Record, checkpoint: Checkpoint
) -> LoggedModel | None:
    """The newest LoggedModel that this project has of an unchanged model and its evaluation.

    None if the model's stage ran, or if MLflow has to store files that this LoggedModel lacks.
    """
    if record.tags.get("dvc") != "unchanged" or PROJECT not in record.tags:
        return None
    names = (PROJECT, "round", *EVALUATION)
    tags = {name: record.tags[name] for name in names if name in record.tags}
    tags["md5"] = checkpoint.digest
    if checkpoint.files:
        tags[DIGEST] = checkpoint.files.digest
    query = [f"name = '{checkpoint.name}'"]
    query += [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    newest_first = [{"field_name": "creation_timestamp", "ascending": False}]
    newest = client.search_logged_models(
        [experiment], " AND ".join(query), max_results=1, order_by=newest_first
    )
    return next((model for model in newest if model.status != LoggedModelStatus.FAILED), None)


def create_model(
    client: MlflowClient, experiment: str, run_id: str, record: Record, checkpoint: Checkpoint
) -> LoggedModel:
    """A LoggedModel: PENDING if its files follow, else one whose files MLflow does not have."""
    tags = {"md5": checkpoint.digest, "stage": checkpoint.stage, "rondo.run": record.run}
    tags |= {name: record.tags[name] for name in MODEL_TAGS if name in record.tags}
    tags |= {f"data {data.path}": data.digest for data in record.inputs}
    if checkpoint.no_files:
        tags[MLFLOW_RUN_NOTE] = f"MLflow does not have the files: {checkpoint.no_files}"
    params = {"path": checkpoint.path, "step": str(checkpoint.step)}
    if checkpoint.files:
        create = mlflow.initialize_logged_model
        tags[DIGEST] = checkpoint.files.digest
    else:
        create = mlflow.create_external_model
    model = create(checkpoint.name, run_id, tags, params, checkpoint.stage, experiment)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, checkpoint.step)])
    return model
