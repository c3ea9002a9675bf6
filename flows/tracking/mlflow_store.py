"""Send records to MLflow.

A pipeline run is a parent run, each stage of a round a child run, each checkpoint a LoggedModel.
Runs are identified by their tags, and MLflow stores equal metrics once, so that sending a record
twice changes nothing.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pandas
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    Metric,
    Param,
    RunTag,
)
from mlflow.entities.lifecycle_stage import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID
from requests.exceptions import RequestException
from sqlalchemy.exc import SQLAlchemyError

from flows.core.services import MLFLOW_URL, is_up, without_credentials
from flows.tracking import model_registry
from flows.tracking.records import Checkpoint, Record, Step, health
from stages.lib.core.errors import BadInput, RondoError

EXPERIMENT = "rondo"
MAX_METRICS, MAX_PARAMS, MAX_TAGS = 1000, 100, 100  # per request, limits of MLflow
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
TRACKING_URI = "MLFLOW_TRACKING_URI"
OFF = "off"
MAX_VALUE = 5000  # characters of a param or tag
FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)


def connect(uri: str) -> MlflowClient:
    """A client of the MLflow server or database at `uri`; this process logs there from now on."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    user_uri = os.environ.get(TRACKING_URI)
    mlflow.set_tracking_uri(uri)
    # MLflow also sets the environment variable. The next run in this process, and its child
    # processes, would take it for the user's choice.
    if user_uri is None:
        os.environ.pop(TRACKING_URI, None)
    return MlflowClient(uri)


class MlflowStore:
    """An MLflow server or database; every call may raise one of FAILURES."""

    def __init__(self, uri: str, artifacts: Path | None) -> None:
        """Open the experiment, or create it.

        Args:
            artifacts: the artifact folder of a new experiment; None: the server chooses it.
        """
        self.client = connect(uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
            # The name stays taken, and MLflow accepts no run in a deleted experiment.
            self.client.restore_experiment(experiment.experiment_id)
        location = artifacts.as_uri() if artifacts else None
        self.experiment = (
            experiment.experiment_id
            if experiment
            else self.client.create_experiment(EXPERIMENT, location)
        )
        self.runs: dict[tuple[str, str], str] = {}  # MLflow's run id by run and address

    def is_reachable(self) -> bool:
        """Whether MLflow answers now."""
        try:
            self.client.get_experiment(self.experiment)
        except FAILURES:
            return False
        return True

    def run_id(self, run: str, address: str, started: int) -> str:
        """The MLflow run of a stage, created if it does not exist.

        The empty address stands for the pipeline run. `started`: milliseconds since the epoch.
        """
        key = (run, address)
        if key not in self.runs:
            tags = {"rondo.run": run, "rondo.address": address or "pipeline"}
            query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            matches = self.client.search_runs([self.experiment], query)
            if matches:
                mlflow_run = matches[0]
            else:
                if address:
                    tags[MLFLOW_PARENT_RUN_ID] = self.run_id(run, "", started)
                name = address or run
                mlflow_run = self.client.create_run(self.experiment, started, tags, name)
            self.runs[key] = mlflow_run.info.run_id
        return self.runs[key]

    def send_steps(self, run: str, address: str, started: int, steps: Sequence[Step]) -> None:
        """Send metrics by step to the stage's run.

        PPO's health goes to the pipeline run too: MLflow compares pipeline runs in one chart.
        """
        self._log_metrics(self.run_id(run, address, started), steps)
        self._log_metrics(self.run_id(run, "", started), health(address, steps))

    def _log_metrics(self, run_id: str, steps: Sequence[Step]) -> None:
        for first in range(0, len(steps), MAX_METRICS):
            batch = steps[first : first + MAX_METRICS]
            metrics = [Metric(step.key, step.value, step.time, step.step) for step in batch]
            self.client.log_batch(run_id, metrics=metrics)

    def send(self, record: Record) -> None:
        """Send all parts of a record; a part that MLflow has already is not stored twice."""
        run_id = self.run_id(record.run, record.address, record.started)
        params = [Param(key, value[:MAX_VALUE]) for key, value in record.params.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
        tags = [RunTag(key, value[:MAX_VALUE]) for key, value in record.tags.items()]
        for first in range(0, len(tags), MAX_TAGS):
            self.client.log_batch(run_id, tags=tags[first : first + MAX_TAGS])
        last = max((step.step for step in record.steps), default=0)
        final = [
            Step(key=f"final/{key}", value=value, time=record.ended, step=last)
            for key, value in record.final.items()
        ]
        self.send_steps(record.run, record.address, record.started, [*record.steps, *final])
        self._send_files(run_id, record)
        self._send_checkpoints(run_id, record)
        if record.status != "RUNNING":
            self.client.set_terminated(run_id, record.status, record.ended)
        if record.promotion:
            model_registry.promote(
                self.client, self.experiment, run_id, record.promotion, record.ended
            )

    def _send_files(self, run_id: str, record: Record) -> None:
        """Names and hashes of input data, texts as artifacts, samples as a table."""
        if record.inputs:
            context = [InputTag(MLFLOW_DATASET_CONTEXT, "input")]
            datasets = [
                Dataset(data.path, data.digest, "local", json.dumps({"uri": data.path}))
                for data in record.inputs
            ]
            inputs = [DatasetInput(dataset, context) for dataset in datasets]
            self.client.log_inputs(run_id, inputs)
        for name, text in record.texts.items():
            self.client.log_text(run_id, text, name)
        # log_table appends, so a second call would store every sample twice.
        if record.samples and "samples.json" not in [
            file.path for file in self.client.list_artifacts(run_id)
        ]:
            rows = [{key: _cell(value) for key, value in row.items()} for row in record.samples]
            self.client.log_table(run_id, pandas.DataFrame(rows), "samples.json")

    def _send_checkpoints(self, run_id: str, record: Record) -> None:
        outputs = self.client.get_run(run_id).outputs if record.checkpoints else None
        models = outputs.model_outputs if outputs else []
        known = {self.client.get_logged_model(model.model_id).name for model in models}
        for checkpoint in record.checkpoints:
            if checkpoint.name not in known:
                self._send_checkpoint(run_id, record, checkpoint)

    def _send_checkpoint(self, run_id: str, record: Record, checkpoint: Checkpoint) -> None:
        tags = {"md5": checkpoint.digest, "stage": checkpoint.stage, "rondo.run": record.run}
        for name in ("round", "seed", "revision", "preset", "evaluation_id", "lineage"):
            if name in record.tags:
                tags[name] = record.tags[name]
        model = mlflow.create_external_model(
            checkpoint.name,
            source_run_id=run_id,
            params={"path": checkpoint.path, "step": str(checkpoint.step)},
            tags=tags,
            model_type="checkpoint",
            experiment_id=self.experiment,
        )
        metrics = [
            Metric(name, value, record.ended, checkpoint.step, model_id=model.model_id)
            for name, value in checkpoint.metrics.items()
        ]
        self.client.log_batch(run_id, metrics)
        self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, checkpoint.step)])


def _cell(value: object) -> object:
    """A value that MLflow's tables can hold; lists and mappings become JSON."""
    if isinstance(value, str | int | float | bool | None):
        return value
    return json.dumps(value, ensure_ascii=False)


def store_uri(home: Path) -> str:
    """Where records go: MLFLOW_TRACKING_URI if set, else the local server, else its database."""
    if uri := os.environ.get(TRACKING_URI, ""):
        return uri
    return MLFLOW_URL if is_up(f"{MLFLOW_URL}/health") else f"sqlite:///{home / 'mlflow.db'}"


@contextmanager
def registry(home: Path) -> Iterator[MlflowClient]:
    """A client of the store that `open_tracker` sends records to.

    Raises:
        BadInput: tracking is switched off, or no run has been recorded.
        RondoError: MLflow is unreachable or returned an error.
    """
    uri, database = store_uri(home), home / "mlflow.db"
    if uri == OFF:
        raise BadInput(
            "MLFLOW_TRACKING_URI is `off`: unset it, or set it to the MLflow that has the runs"
        )
    if uri == f"sqlite:///{database}" and not database.exists():
        raise BadInput(f"{database} is missing: no run was recorded here; `rondo run` records one")
    try:
        yield connect(uri)
    except FAILURES as error:
        raise RondoError(
            f"MLflow at {without_credentials(uri)} failed ({cause(error)}): start it, or set "
            "MLFLOW_TRACKING_URI to one that is running"
        ) from None


def experiment_of(client: MlflowClient) -> str:
    """The id of Rondo's experiment.

    Raises:
        BadInput: there is none.
    """
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        raise BadInput("MLflow has no run of Rondo's: `rondo run` records one")
    return str(experiment.experiment_id)


def cause(error: Exception) -> str:
    """The first line of an error's message, at most 120 characters, without passwords."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{without_credentials(line):.120}"
