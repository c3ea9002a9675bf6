"""Send records to MLflow.

A pipeline run is a parent run, each stage of a round a child run, each checkpoint a LoggedModel.
Runs and models are found by their tags, and MLflow stores equal metrics once, so that sending a
record twice changes nothing.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import mlflow
import pandas
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.entities.lifecycle_stage import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, ErrorCode
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_MODEL_IS_EXTERNAL,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
)
from requests.exceptions import RequestException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.core.databases import make_database
from flows.core.services import (
    MLFLOW_DATABASE,
    TRACKING_URI,
    running_mlflow,
    sqlite_uri,
    without_credentials,
)
from flows.tracking import model_registry
from flows.tracking.mlflow_server import make_tables
from flows.tracking.models import Checkpoint
from flows.tracking.provenance import PROJECT
from flows.tracking.records import Record, Step, health
from stages.lib.core.errors import BadInput, RondoError

EXPERIMENT = "rondo"
# Data set of a model's metrics. MLflow's charts have it in their titles, by which they join models:
# it is short, and the same in all rounds.
HELD_OUT, HELD_DATA = "eval", "prepare/data"
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
SQLITE = "sqlite:///"
OFF = "off"
MAX_VALUE = 5000  # characters of a param or tag
MAX_REASON = 1000  # characters of an error's message
OTHER_STORE = (
    f"set {TRACKING_URI} to an MLflow server (http://...) or a database (sqlite:///...), or unset "
    "it for the project's own"
)
EVALUATION = ("evaluation_id", "lineage")  # tags of a record, for the models of its evaluation
MODEL_TAGS = ("round", "seed", "revision", "preset", PROJECT)  # of a record, for its models
# Tags: the pipeline run, the stage, and a hash of the record that MLflow has completely
RUN, ADDRESS, RECORD = "rondo.run", "rondo.address", "rondo.record"
PAGE = 100  # runs or models of one request
PIPELINE = "pipeline"  # the address of a pipeline run
ENDED = ("FINISHED", "FAILED", "KILLED")
FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)


def connect(uri: str) -> MlflowClient:
    """A client of the MLflow server or database at `uri`; this process logs there from now on.

    Raises:
        BadInput: no record can ever be sent to this address: MLflow refuses it, or the server is
            older than MLflow 3.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    if uri.startswith(SQLITE) and (database := make_url(uri).database):
        make_database(Path(database), make_tables)
    user_uri = os.environ.get(TRACKING_URI)
    mlflow.set_tracking_uri(uri)
    # MLflow also sets the environment variable. The next run in this process, and its child
    # processes, would take it for the user's choice.
    if user_uri is None:
        os.environ.pop(TRACKING_URI, None)
    else:
        os.environ[TRACKING_URI] = user_uri
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
        self.client, self.local = connect(uri), local
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

    def run_id(self, run: str, address: str, started: int) -> str:
        """The MLflow run of a stage, created if it does not exist.

        The empty address stands for the pipeline run. `started`: milliseconds since the epoch.
        """
        if (run, address) not in self.runs:
            self.runs_of(run)
        if (run, address) not in self.runs:
            tags = {RUN: run, ADDRESS: address or PIPELINE}
            if address:
                tags[MLFLOW_PARENT_RUN_ID] = self.run_id(run, "", started)
            created = self.client.create_run(self.experiment, started, tags, address or run)
            self.runs[run, address] = created.info.run_id
        return self.runs[run, address]

    def runs_of(self, run: str) -> dict[str, Run]:
        """The MLflow runs of a pipeline run by address; its own has the empty one."""
        query = f"tags.`{RUN}` = '{run}'"
        matches: list[Run] = get_results_from_paginated_fn(
            lambda number, token: self.client.search_runs(
                [self.experiment], query, max_results=number, page_token=token
            ),
            PAGE,
        )
        runs = {one.data.tags[ADDRESS].removeprefix(PIPELINE): one for one in matches}
        self.runs |= {(run, address): one.info.run_id for address, one in runs.items()}
        return runs

    def send_steps(self, run: str, address: str, started: int, steps: Sequence[Step]) -> None:
        """Send metrics by step to the stage's run.

        PPO's health goes to the pipeline run too: MLflow compares pipeline runs in one chart.
        """
        for part, of_part in ((address, steps), ("", health(address, steps))):
            metrics = [Metric(step.key, step.value, step.time, step.step) for step in of_part]
            self.client.log_batch(self.run_id(run, part, started), metrics)

    def send(self, record: Record, digest: str = "") -> None:
        """Send all parts of a record but the files of its models; a part that MLflow has already is
        not stored twice.

        Args:
            digest: the hash of its file, which becomes a tag when MLflow has all of it.
        """
        run_id = self.run_id(record.run, record.address, record.started)
        params = [Param(key, text[:MAX_VALUE]) for key, text in record.params.items()]
        tags = [RunTag(key, text[:MAX_VALUE]) for key, text in record.tags.items()]
        self.client.log_batch(run_id, params=params, tags=tags)
        last = max((step.step for step in record.steps), default=0)
        final = [
            Step(key=f"final/{key}", value=value, time=record.ended, step=last)
            for key, value in record.final.items()
        ]
        self.send_steps(record.run, record.address, record.started, [*record.steps, *final])
        self._send_files(run_id, record)
        self._send_models(run_id, record)
        if record.promotion:
            model_registry.register(
                self.client, self.experiment, run_id, record.promotion, record.ended
            )
        self._set_status(run_id, record)
        self.client.set_tag(run_id, RECORD, digest)

    def _set_status(self, run_id: str, record: Record) -> None:
        if record.status not in ENDED:
            self.client.update_run(run_id, record.status)
            return
        info = self.client.get_run(run_id).info
        # the clock may have been set back since the start
        ended = max(record.ended, info.start_time)
        if record.address:
            # Tries of a stage share a run, and people or servers let the second one wait. A stage
            # that an earlier try completed does not compute again.
            worked = record.ended - record.started
            ended = info.start_time + worked if worked else info.end_time or ended
        elif record.status == "KILLED":  # and with it the stage that was computing
            for stage in self.runs_of(record.run).values():
                if stage.info.status == "RUNNING" and stage.info.run_id != run_id:
                    end = max(ended, stage.info.start_time)
                    self.client.set_terminated(stage.info.run_id, record.status, end)
        self.client.set_terminated(run_id, record.status, ended)

    def _send_files(self, run_id: str, record: Record) -> None:
        """Names and hashes of input data, texts as artifacts, samples as a table."""
        if record.inputs:
            inputs = [_data_set(*data, data[0], "input") for data in record.inputs.items()]
            self.client.log_inputs(run_id, inputs)
        for name, text in record.texts.items():
            self.client.log_text(run_id, text, name)
        # log_table appends, so a second call would store every sample twice.
        if record.samples and "samples.json" not in [
            file.path for file in self.client.list_artifacts(run_id)
        ]:
            rows = [{key: _cell(value) for key, value in row.items()} for row in record.samples]
            self.client.log_table(run_id, pandas.DataFrame(rows), "samples.json")

    def _send_models(self, run_id: str, record: Record) -> None:
        """LoggedModels: outputs of the run of the stage that made them, inputs of other runs."""
        data = next((data for data in record.inputs.items() if data[0].endswith(HELD_DATA)), None)
        if data and any(checkpoint.metrics for checkpoint in record.checkpoints):
            self.client.log_inputs(run_id, [_data_set(*data, HELD_OUT, "eval")])
        for checkpoint in record.checkpoints:
            maker = checkpoint.made_by or record.address
            owner = self.runs.get((record.run, maker), run_id)
            model = self._earlier_model(record, checkpoint)
            if model is None:
                made = self._find_model(checkpoint.name, {}, f"source_run_id = '{owner}'")
                model = made or self._create_model(owner, record, checkpoint)
                self._send_metrics(run_id, record, checkpoint, model.model_id, data)
            if model.source_run_id != run_id:
                self.client.log_inputs(run_id, models=[LoggedModelInput(model.model_id)])

    def _earlier_model(self, record: Record, checkpoint: Checkpoint) -> LoggedModel | None:
        """The newest LoggedModel that this project has of an unchanged model and its evaluation.

        None if the model's stage ran, or if MLflow has to store files that this LoggedModel lacks.
        """
        if record.tags.get("dvc") != "unchanged" or PROJECT not in record.tags:
            return None
        names = (PROJECT, "round", *EVALUATION)
        tags = {name: record.tags[name] for name in names if name in record.tags}
        tags["md5"] = checkpoint.digest
        return self._find_model(checkpoint.name, tags, with_files=bool(checkpoint.files))

    def _find_model(
        self, name: str, tags: Mapping[str, str], *conditions: str, with_files: bool = False
    ) -> LoggedModel | None:
        """The newest LoggedModel with this name and these tags.

        Args:
            with_files: whether MLflow must have its files, or get them.
        """
        query = [f"name = '{name}'", *conditions]
        query += [f"tags.`{tag}` = '{value}'" for tag, value in tags.items()]
        newest_first = [{"field_name": "creation_timestamp", "ascending": False}]
        models = self.client.search_logged_models(
            [self.experiment], " AND ".join(query), order_by=newest_first
        )
        return next((model for model in models if has_files(model) or not with_files), None)

    def _create_model(self, owner: str, record: Record, checkpoint: Checkpoint) -> LoggedModel:
        """A LoggedModel: PENDING if its files follow, else one whose files MLflow does not have."""
        tags = {"md5": checkpoint.digest, "stage": checkpoint.stage, RUN: record.run}
        tags |= {name: record.tags[name] for name in MODEL_TAGS if name in record.tags}
        tags |= {f"data {path}": digest for path, digest in record.inputs.items()}
        if checkpoint.no_files:
            tags[MLFLOW_RUN_NOTE] = f"MLflow does not have the files: {checkpoint.no_files}"
        params = {"path": checkpoint.path, "step": str(checkpoint.step)}
        creates = (mlflow.create_external_model, mlflow.initialize_logged_model)
        create = creates[bool(checkpoint.files)]
        model = create(checkpoint.name, owner, tags, params, checkpoint.stage, self.experiment)
        self.client.log_outputs(owner, [LoggedModelOutput(model.model_id, checkpoint.step)])
        return model

    def _send_metrics(
        self,
        run_id: str,
        record: Record,
        checkpoint: Checkpoint,
        model_id: str,
        data: tuple[str, str] | None,
    ) -> None:
        """The metrics of a model, with the data set on which they were measured."""
        data_set = {"dataset_name": HELD_OUT, "dataset_digest": data[1]} if data else {}
        metrics = [
            Metric(name, value, record.ended, checkpoint.step, model_id=model_id, **data_set)
            for name, value in checkpoint.metrics.items()
        ]
        self.client.log_batch(run_id, metrics)
        if evaluation := {name: record.tags[name] for name in EVALUATION if name in record.tags}:
            self.client.set_logged_model_tags(model_id, evaluation)

    def pending_models(self, run: str) -> list[LoggedModel]:
        """The LoggedModels of a pipeline run whose files are not all there, oldest first."""
        models: list[LoggedModel] = get_results_from_paginated_fn(
            lambda number, token: self.client.search_logged_models(
                [self.experiment],
                f"tags.`{RUN}` = '{run}'",
                max_results=number,
                order_by=[{"field_name": "creation_timestamp"}],
                page_token=token,
            ),
            PAGE,
        )
        return [model for model in models if model.status == LoggedModelStatus.PENDING]

    def sft_model(self, name: str, digest: str) -> str:
        """The id of a LoggedModel with the files of an SFT model.

        Raises:
            BadInput: there is none.
        """
        model = self._find_model(name, {"md5": digest}, with_files=True)
        if model is None or model.status != LoggedModelStatus.READY:
            raise BadInput(f"it adapts the SFT model {name}, whose files MLflow does not have")
        return str(model.model_id)


def has_files(model: LoggedModel) -> bool:
    """Whether MLflow has the files of a model, or gets them."""
    return MLFLOW_MODEL_IS_EXTERNAL not in model.tags and model.status != LoggedModelStatus.FAILED


def _data_set(path: str, digest: str, name: str, context: str) -> DatasetInput:
    dataset = Dataset(name, digest, "local", json.dumps({"uri": path}))
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
    with naming_failures(uri):
        yield connect(uri)


@contextmanager
def naming_failures(uri: str) -> Iterator[None]:
    """Turn each failure of MLflow at `uri` into an error with the next step.

    Raises:
        RondoError: MLflow is unreachable or returned an error.
    """
    try:
        yield
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


def cause(error: Exception) -> str:
    """The first line of an error's message without passwords, at most MAX_REASON characters."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{without_credentials(line):.{MAX_REASON}}"
