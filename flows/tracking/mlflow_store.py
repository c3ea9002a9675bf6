"""Send records to MLflow.

A pipeline run is a parent run, each stage of a round a child run, each checkpoint a LoggedModel.
Runs are identified by their tags, and MLflow stores equal metrics once, so that sending a record
twice changes nothing.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import pandas
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.entities.lifecycle_stage import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, ErrorCode
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID
from requests.exceptions import RequestException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.core.databases import make_database
from flows.core.services import (
    MLFLOW_ARTIFACTS,
    MLFLOW_DATABASE,
    TRACKING_URI,
    running_mlflow,
    sqlite_uri,
    without_credentials,
)
from flows.tracking import model_registry
from flows.tracking.logged_models import EVALUATION, create_model, earlier_model, model_of_run
from flows.tracking.mlflow_server import make_tables
from flows.tracking.model_upload import ModelUpload, upload
from flows.tracking.models import Checkpoint
from flows.tracking.provenance import PROJECT
from flows.tracking.records import Data, Record, Step, health
from stages.lib.core.errors import BadInput, RondoError

EXPERIMENT = "rondo"
# Data set of a model's metrics. MLflow's charts have it in their titles, by which they join models:
# it is short, and the same in all rounds.
HELD_OUT = "eval"
MAX_METRICS, MAX_PARAMS, MAX_TAGS = 1000, 100, 100  # per request, limits of MLflow
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
SQLITE = "sqlite:///"
OFF = "off"
MAX_VALUE = 5000  # characters of a param or tag
REJECTIONS = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
MAX_REASON = 1000  # characters of an error's message
OTHER_STORE = (
    f"set {TRACKING_URI} to an MLflow server (http://...) or a database (sqlite:///...), or unset "
    "it for the project's own"
)
FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)


def artifact_repository(
    artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
) -> ArtifactRepository:
    """MLflow's access to the artifacts behind a server; without the local server, to its folder."""
    uri = tracking_uri or mlflow.get_tracking_uri()
    if not uri.startswith(SQLITE):
        return MlflowArtifactsRepository(artifact_uri, tracking_uri, registry_uri)
    folder = Path(make_url(uri).database or "").resolve().parent / MLFLOW_ARTIFACTS
    return LocalArtifactRepository((folder / urlsplit(artifact_uri).path.lstrip("/")).as_uri())


def connect(uri: str) -> MlflowClient:
    """A client of the MLflow server or database at `uri`; this process logs there from now on.

    Raises:
        BadInput: no record can ever be sent to this address: MLflow refuses it, or the server is
            older than MLflow 3.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    _artifact_repository_registry.register("mlflow-artifacts", artifact_repository)
    if uri.startswith(SQLITE) and (database := make_url(uri).database):
        make_database(Path(database), make_tables)
    user_uri = os.environ.get(TRACKING_URI)
    mlflow.set_tracking_uri(uri)
    # MLflow also sets the environment variable. The next run in this process, and its child
    # processes, would take it for the user's choice.
    if user_uri is None:
        os.environ.pop(TRACKING_URI, None)
    try:
        client = MlflowClient(uri)
    except (MlflowException, ImportError) as error:  # of the address: nothing was requested yet
        raise BadInput(
            f"MLflow cannot use {without_credentials(uri)}: {cause(error).rstrip('.')}. "
            f"Next: {OTHER_STORE}"
        ) from None
    if uri.startswith("http"):
        _check_version(client, uri)
    return client


def _check_version(client: MlflowClient, uri: str) -> None:
    """
    Raises:
        BadInput: the server has no LoggedModels, which are new in MLflow 3.
    """
    try:
        client.search_logged_models(["0"], max_results=1)
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(ENDPOINT_NOT_FOUND):
            raise BadInput(
                f"{without_credentials(uri)} is an MLflow server older than version 3, or another "
                "server: Rondo needs MLflow 3. Next: update the server (`pip install -U mlflow`, "
                f"`mlflow db upgrade`), or {OTHER_STORE}"
            ) from None
        # else this experiment is not there, or not for this user
        if error.get_http_status_code() >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise


class MlflowStore:
    """An MLflow server or database; every call may raise one of FAILURES."""

    def __init__(self, uri: str, local: bool) -> None:
        """Open the experiment, or create it.

        Args:
            uri: of the MLflow server or database.
            local: whether it is the server of `rondo up` or its database; other servers choose
                where artifacts are.
        """
        self.client = connect(uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
            # The name stays taken, and MLflow accepts no run in a deleted experiment.
            self.client.restore_experiment(experiment.experiment_id)
        # Not a folder: clients on other machines read artifacts through the server.
        location = f"mlflow-artifacts:/{EXPERIMENT}" if local else None
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
        if existing := self._existing_run(run, address):
            return existing
        tags = {"rondo.run": run, "rondo.address": address or "pipeline"}
        if address:
            tags[MLFLOW_PARENT_RUN_ID] = self.run_id(run, "", started)
        created = self.client.create_run(self.experiment, started, tags, address or run)
        self.runs[run, address] = created.info.run_id
        return self.runs[run, address]

    def _existing_run(self, run: str, address: str) -> str | None:
        if (run, address) not in self.runs:
            name = address or "pipeline"
            query = f"tags.`rondo.run` = '{run}' and tags.`rondo.address` = '{name}'"
            if matches := self.client.search_runs([self.experiment], query):
                self.runs[run, address] = matches[0].info.run_id
        return self.runs.get((run, address))

    def send_steps(self, run: str, address: str, started: int, steps: Sequence[Step]) -> None:
        """Send metrics by step to the stage's run.

        PPO's health goes to the pipeline run too: MLflow compares pipeline runs in one chart.
        """
        self._log_metrics(self.run_id(run, address, started), steps)
        self._log_metrics(self.run_id(run, "", started), health(address, steps))

    def _log_metrics(self, run_id: str, steps: Sequence[Step]) -> None:
        self._log_batches(
            run_id, [Metric(step.key, step.value, step.time, step.step) for step in steps]
        )

    def _log_batches(self, run_id: str, metrics: Sequence[Metric]) -> None:
        for first in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(run_id, metrics=metrics[first : first + MAX_METRICS])

    def send(self, record: Record) -> list[ModelUpload]:
        """Send all parts of a record; a part that MLflow has already is not stored twice.

        Returns:
            The models whose files are to be uploaded.
        """
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
        uploads = self._send_models(run_id, record)
        self._set_status(run_id, record)
        if record.promotion:
            model_registry.promote(
                self.client, self.experiment, run_id, record.promotion, record.ended
            )
        return uploads

    def _set_status(self, run_id: str, record: Record) -> None:
        info = self.client.get_run(run_id).info
        if record.status in ("FINISHED", "FAILED", "KILLED"):
            # the clock may have been set back since the start
            ended = max(record.ended, info.start_time)
            if record.address:
                # Tries of a stage share a run, and people or servers let the second one wait. A
                # stage that an earlier try completed does not compute again.
                worked = record.ended - record.started
                ended = info.start_time + worked if worked else info.end_time or ended
            self.client.set_terminated(run_id, record.status, ended)
            return
        is_late = (info.end_time or 0) > record.ended  # it has ended since
        if info.status != record.status and not is_late:
            self.client.update_run(run_id, record.status)

    def end_killed(self, project: str, is_alive: Callable[[str], bool]) -> None:
        """Set the status of runs that were killed: RUNNING, and not alive.

        Args:
            project: their tag PROJECT.
            is_alive: whether the process of the run with this name lives.
        """
        query = f"tags.`rondo.address` = 'pipeline' and tags.{PROJECT} = '{project}'"
        for run in self._running(query):
            if not is_alive(run.data.tags["rondo.run"]):
                family = f"tags.{MLFLOW_PARENT_RUN_ID} = '{run.info.run_id}'"
                stages = self.client.search_runs([self.experiment], family)
                last = max(one.info.end_time or one.info.start_time for one in (run, *stages))
                for killed in (run, *self._running(family)):
                    self.client.set_terminated(killed.info.run_id, "KILLED", last)

    def _running(self, query: str) -> list[Run]:
        return list(
            self.client.search_runs([self.experiment], f"attributes.status = 'RUNNING' and {query}")
        )

    def _send_files(self, run_id: str, record: Record) -> None:
        """Names and hashes of input data, texts as artifacts, samples as a table."""
        if record.inputs:
            inputs = [_data_set(data, data.path, "input") for data in record.inputs]
            self.client.log_inputs(run_id, inputs)
        for name, text in record.texts.items():
            self.client.log_text(run_id, text, name)
        # log_table appends, so a second call would store every sample twice.
        if record.samples and "samples.json" not in [
            file.path for file in self.client.list_artifacts(run_id)
        ]:
            rows = [{key: _cell(value) for key, value in row.items()} for row in record.samples]
            self.client.log_table(run_id, pandas.DataFrame(rows), "samples.json")

    def _send_models(self, run_id: str, record: Record) -> list[ModelUpload]:
        """LoggedModels: outputs of the run of the stage that made them, inputs of other runs.

        Returns:
            The models whose files are to be uploaded.
        """
        uploads = []
        data = next((data for data in record.inputs if data.path.endswith("prepare/data")), None)
        if data and any(checkpoint.metrics for checkpoint in record.checkpoints):
            self.client.log_inputs(run_id, [_data_set(data, HELD_OUT, "eval")])
        used = []
        for checkpoint in record.checkpoints:
            model = earlier_model(self.client, self.experiment, record, checkpoint)
            if model:
                used.append(LoggedModelInput(model.model_id))
            else:
                model = self._send_model(run_id, record, checkpoint, data)
            if checkpoint.files and model.status == LoggedModelStatus.PENDING:
                uploads.append(
                    ModelUpload(
                        model_id=model.model_id, name=checkpoint.name, files=checkpoint.files
                    )
                )
        if used:
            self.client.log_inputs(run_id, models=used)
        return uploads

    def _send_model(
        self, run_id: str, record: Record, checkpoint: Checkpoint, data: Data | None
    ) -> LoggedModel:
        """The LoggedModel of this pipeline run, created if it does not exist, and its metrics."""
        owner = self._existing_run(record.run, checkpoint.made_by or record.address) or run_id
        model = model_of_run(self.client, self.experiment, owner, checkpoint.name)
        model = model or create_model(self.client, self.experiment, owner, record, checkpoint)
        self._send_metrics(run_id, record, checkpoint, model.model_id, data)
        if owner != run_id:
            self.client.log_inputs(run_id, models=[LoggedModelInput(model.model_id)])
        return model

    def _send_metrics(
        self,
        run_id: str,
        record: Record,
        checkpoint: Checkpoint,
        model_id: str,
        data: Data | None,
    ) -> None:
        """The metrics of a model, with the data set on which they were measured."""
        metrics = [
            Metric(
                name,
                value,
                record.ended,
                checkpoint.step,
                model_id=model_id,
                dataset_name=HELD_OUT if data else None,
                dataset_digest=data.digest if data else None,
            )
            for name, value in checkpoint.metrics.items()
        ]
        self._log_batches(run_id, metrics)
        if evaluation := {name: record.tags[name] for name in EVALUATION if name in record.tags}:
            self.client.set_logged_model_tags(model_id, evaluation)

    def upload(self, item: ModelUpload) -> None:
        """Upload the files of a model; an interrupted upload goes on."""
        upload(self.client, item)


def _data_set(data: Data, name: str, context: str) -> DatasetInput:
    dataset = Dataset(name, data.digest, "local", json.dumps({"uri": data.path}))
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])


def _cell(value: object) -> object:
    """A value that MLflow's tables can hold; lists and mappings become JSON."""
    if isinstance(value, str | int | float | bool | None):
        return value
    return json.dumps(value, ensure_ascii=False)


def store_uri(home: Path) -> str:
    """Where records go: MLFLOW_TRACKING_URI if set, else the project's server or database."""
    if uri := os.environ.get(TRACKING_URI, ""):
        return _absolute(uri, home.parent)
    servers = running_mlflow(home)
    return servers.mlflow if servers else sqlite_uri(home / MLFLOW_DATABASE)


def _absolute(uri: str, folder: Path) -> str:
    """The address with an absolute path if it is a path relative to `folder`, the project's: an
    isolated run has another working directory, which is removed later.
    """
    if uri.startswith(SQLITE):
        database = make_url(uri).database or ":memory:"
        if database.startswith(("/", ":memory:", "file:")):
            return uri
        _, mark, query = uri.partition("?")
        return f"{sqlite_uri(folder / database)}{mark}{query}"
    is_path = "://" not in uri and uri not in (OFF, "databricks", "databricks-uc", "uc")
    return str(folder / uri.removeprefix("file:")) if is_path else uri


@contextmanager
def registry(home: Path) -> Iterator[MlflowClient]:
    """A client of the store that `open_tracker` sends records to.

    Raises:
        BadInput: tracking is switched off, or no run has been recorded.
        RondoError: MLflow is unreachable or returned an error.
    """
    uri, database = store_uri(home), home / MLFLOW_DATABASE
    if uri == OFF:
        raise BadInput(
            "MLFLOW_TRACKING_URI is `off`: unset it, or set it to the MLflow that has the runs"
        )
    if uri == sqlite_uri(database) and not database.exists():
        raise BadInput(f"{database} is missing: no run was recorded here; `rondo run` records one")
    try:
        yield connect(uri)
    except FAILURES as error:
        fix = "start it, or set MLFLOW_TRACKING_URI to one that is running"
        if uri.startswith(SQLITE):
            fix = "if it is damaged, restore a copy, or move it away: `rondo run` makes a new one"
        raise RondoError(
            f"MLflow at {without_credentials(uri)} failed ({cause(error)}): {fix}"
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


def may_pass(error: Exception) -> bool:
    """Whether MLflow may take later what it has not taken now, e.g. since its disk is full or the
    token has expired; else it rejected what it was sent.
    """
    if isinstance(error, MlflowException):
        return error.get_http_status_code() not in REJECTIONS
    if isinstance(error, RequestException) and error.response is not None:
        return error.response.status_code not in REJECTIONS
    return isinstance(error, FAILURES)


def cause(error: Exception) -> str:
    """The first line of an error's message without passwords, at most MAX_REASON characters."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{without_credentials(line):.{MAX_REASON}}"
