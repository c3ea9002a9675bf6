"""Send records to MLflow.

A pipeline run is a parent run, each stage of a round a child run, each checkpoint a LoggedModel.
Runs and models are found by their tags, and MLflow stores equal metrics once, so that sending a
record twice changes nothing. A LoggedModel is PENDING until all of its files are stored. An adapter
refers to the LoggedModel of its SFT model.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
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
from mlflow.models import Model, infer_signature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, ErrorCode
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_MODEL_IS_EXTERNAL,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
)
from pandas import DataFrame
from requests.exceptions import RequestException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

import stages
from flows.core.databases import make_database
from flows.core.services import (
    ARTIFACTS,
    EXPERIMENT,
    MLFLOW_DATABASE,
    TRACKING_URI,
    running_mlflow,
    sqlite_uri,
    without_credentials,
)
from flows.tracking import model_registry
from flows.tracking.mlflow_server import make_tables
from flows.tracking.provenance import PROJECT
from flows.tracking.records import Checkpoint, Record, Step, health
from stages.lib.core.errors import BadInput, RondoError

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
PIPELINE = "pipeline"  # the address of a pipeline run
ENDED = ("FINISHED", "FAILED", "KILLED")
FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)
# Of a model with files
CODE = Path(__file__).with_name("pyfunc_model.py")
ROOMS = ("core", "data", "lm", "thresholds")  # of stages/lib, which CODE imports
PACKAGES = (
    *("mlflow", "torch", "transformers", "peft", "safetensors"),
    *("pydantic", "ruamel.yaml", "pandas", "Jinja2"),
)
WEIGHTS = "weights"  # subfolder of a model, as in CODE
ADAPTER = "adapter_config.json"


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


def check_address(uri: str) -> None:
    """Refuse an address that can never take a record; a server that is away may come back.

    Raises:
        BadInput: see `connect`.
    """
    if uri != OFF and uri.partition(":")[0].partition("+")[0] not in DATABASE_ENGINES:
        with suppress(*FAILURES):
            connect(uri)


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

    def __init__(self, uri: str) -> None:
        """Open the experiment, or create it."""
        self.client = connect(uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
            # The name stays taken, and MLflow accepts no run in a deleted experiment.
            self.client.restore_experiment(experiment.experiment_id)
        # The server that the user names chooses where artifacts are. For the project's own it is no
        # folder: clients on other machines read artifacts through the server.
        is_own = not os.environ.get(TRACKING_URI)
        location = ARTIFACTS if is_own else None
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
        matches = mlflow.search_runs([self.experiment], query, output_format="list")
        runs = {one.data.tags[ADDRESS].removeprefix(PIPELINE): one for one in matches}
        self.runs |= {(run, address): one.info.run_id for address, one in runs.items()}
        return runs

    def send_steps(self, run: str, address: str, started: int, steps: Sequence[Step]) -> None:
        """Send metrics by step to the stage's run.

        PPO's health goes to the pipeline run too: MLflow compares pipeline runs in one chart.
        """
        for part, of_part in ((address, steps), ("", health(address, steps))):
            metrics = [Metric(*step) for step in of_part]
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
            Step(f"final/{key}", value, record.ended, last) for key, value in record.final.items()
        ]
        self.send_steps(record.run, record.address, record.started, [*record.steps, *final])
        self._send_files(run_id, record)
        self._send_models(run_id, record)
        if record.promotion:
            model_registry.register(
                self.client, self.experiment, run_id, record.promotion, record.ended
            )
        self._set_status(run_id, record)
        if record.name:
            self.client.update_run(run_id, name=record.name)
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
            self.client.log_table(run_id, DataFrame(rows), "samples.json")

    def _send_models(self, run_id: str, record: Record) -> None:
        """LoggedModels: outputs of the run of the stage that made them, inputs of other runs."""
        data = next((data for data in record.inputs.items() if data[0].endswith(HELD_DATA)), None)
        if data and any(checkpoint.metrics for checkpoint in record.checkpoints):
            self.client.log_inputs(run_id, [_data_set(*data, HELD_OUT, "eval")])
        data_set = (HELD_OUT, data[1]) if data else (None, None)
        evaluation = {name: record.tags[name] for name in EVALUATION if name in record.tags}
        for checkpoint in record.checkpoints:
            maker = checkpoint.made_by or record.address
            owner = self.runs.get((record.run, maker), run_id)
            model = self._earlier_model(record, checkpoint)
            if model is None:
                same = {"name": checkpoint.name, "tags.md5": checkpoint.digest}
                made = self._find_model(same | {"source_run_id": owner})
                model = made or self._create_model(owner, record, checkpoint)
                metrics = [
                    Metric(name, value, record.ended, checkpoint.step, model.model_id, *data_set)
                    for name, value in checkpoint.metrics.items()
                ]
                self.client.log_batch(run_id, metrics)
                if evaluation:
                    self.client.set_logged_model_tags(model.model_id, evaluation)
            if model.source_run_id != run_id:
                self.client.log_inputs(run_id, models=[LoggedModelInput(model.model_id)])

    def _earlier_model(self, record: Record, checkpoint: Checkpoint) -> LoggedModel | None:
        """The newest LoggedModel that this project has of an unchanged model and its evaluation.

        None if the model's stage ran, or if MLflow has to store files that this LoggedModel lacks.
        """
        if record.tags.get("dvc") != "unchanged" or PROJECT not in record.tags:
            return None
        same = {"name": checkpoint.name, "tags.md5": checkpoint.digest}
        names = (PROJECT, "round", *EVALUATION)
        same |= {f"tags.{name}": record.tags[name] for name in names if name in record.tags}
        return self._find_model(same, with_files=bool(checkpoint.files))

    def _find_model(self, same: Mapping[str, str], with_files: bool = False) -> LoggedModel | None:
        """The newest LoggedModel with these attributes; one that has files, or gets them, if
        `with_files`.
        """
        models = self.client.search_logged_models(
            [self.experiment],
            " AND ".join(f"{key} = '{value}'" for key, value in same.items()),
            order_by=[{"field_name": "creation_timestamp", "ascending": False}],
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
        external, internal = mlflow.create_external_model, mlflow.initialize_logged_model
        create = internal if checkpoint.files else external
        model = create(checkpoint.name, owner, tags, params, checkpoint.stage, self.experiment)
        self.client.log_outputs(owner, [LoggedModelOutput(model.model_id, checkpoint.step)])
        return model

    def pending_models(self, run: str) -> list[LoggedModel]:
        """The LoggedModels of a pipeline run whose files are not all there, oldest first."""
        models = mlflow.search_logged_models(
            [self.experiment],
            f"tags.`{RUN}` = '{run}'",
            order_by=[{"field_name": "creation_timestamp"}],
            output_format="list",
        )
        return [model for model in models if model.status == LoggedModelStatus.PENDING]

    def upload(self, model: LoggedModel, source: tuple[Record, Checkpoint] | None) -> None:
        """Store the files of a model that loads by one line, and make its LoggedModel READY.

        Raises:
            BadInput: its record or a file is gone, or MLflow does not have the SFT model of an
                adapter; the LoggedModel is FAILED then.
        """
        client, model_id = self.client, model.model_id
        try:
            if source is None:
                raise BadInput("its record is gone")
            record, checkpoint = source
            is_adapter = any(file.name == ADAPTER for file in checkpoint.files)
            sft_model = self._sft_model(record) if is_adapter else ""
            with TemporaryDirectory() as temporary:
                folder = Path(temporary, "model")
                save_model(model, record, checkpoint, sft_model, folder)
                client.log_model_artifacts(model_id, str(folder))
        except BadInput as error:
            client.set_logged_model_tags(model_id, {MLFLOW_RUN_NOTE: f"No files: {error}"})
            client.finalize_logged_model(model_id, LoggedModelStatus.FAILED)
            raise BadInput(f"MLflow does not get the files of {model.name}: {error}") from None
        note = (
            f'`model = mlflow.pyfunc.load_model("models:/{model_id}")`, then '
            "`model.predict(model.input_example)`"
        )
        client.set_logged_model_tags(model_id, {MLFLOW_RUN_NOTE: note})
        client.finalize_logged_model(model_id, LoggedModelStatus.READY)

    def _sft_model(self, record: Record) -> str:
        """The id of the LoggedModel whose weights the adapters of a record adapt.

        Raises:
            BadInput: MLflow does not have its files.
        """
        name = f"{record.tags['round']}-sft"
        model = self._find_model({"name": name, "tags.md5": record.sft_digest}, with_files=True)
        if model is None or model.status != LoggedModelStatus.READY:
            raise BadInput(f"it adapts the SFT model {name}, whose files MLflow does not have")
        return str(model.model_id)


def has_files(model: LoggedModel) -> bool:
    """Whether MLflow has the files of a model, or gets them."""
    return MLFLOW_MODEL_IS_EXTERNAL not in model.tags and model.status != LoggedModelStatus.FAILED


def save_model(
    model: LoggedModel, record: Record, checkpoint: Checkpoint, sft_model: str, folder: Path
) -> None:
    """Write an MLflow model to a new folder, with links to its weights.

    Args:
        model: the LoggedModel that it belongs to.
        sft_model: the LoggedModel with the weights that it adapts; empty: none.
        folder: does not exist yet.
    """
    mlflow_model = Model(
        artifact_path=model.artifact_location,
        model_uuid=model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id,
    )
    examples, settings = DataFrame(record.examples), record.settings
    if checkpoint.stage == "reward":
        task, signature = "score", infer_signature(examples, [0.5])
    else:
        sampling = {
            "max_new_tokens": settings["ppo"]["response_length"],
            "temperature": settings["ppo"]["temperature"],
            "seed": settings["seed"] * 1000,  # that of the evaluation's first sample
        }
        task, signature = "generate", infer_signature(examples, ["a text"], params=sampling)
    with TemporaryDirectory() as temporary:
        copy, source = Path(temporary, "stages"), Path(stages.__file__).parent
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / "lib" / room, copy / "lib" / room, ignore=ignored)
        for package in ("__init__.py", "lib/__init__.py"):
            shutil.copy(source / package, copy / package)
        mlflow.pyfunc.save_model(
            folder,
            python_model=str(CODE),
            code_paths=[str(copy)],
            signature=signature,
            input_example=examples,
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
            model_config={"task": task, "sft_model": sft_model, **settings},
            mlflow_model=mlflow_model,
        )
    for file in checkpoint.files:
        link = folder / WEIGHTS / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.find())
    files = [path for path in folder.rglob("*") if path.is_file()]
    mlflow_model.model_size_bytes = sum(path.stat().st_size for path in files)
    mlflow_model.save(folder / MLMODEL_FILE_NAME)


def _data_set(path: str, digest: str, name: str, context: str) -> DatasetInput:
    dataset = Dataset(name, digest, "local", json.dumps({"uri": path}))
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])


def _cell(value: object) -> object:
    """A value that MLflow's tables can hold; lists and mappings become JSON."""
    if isinstance(value, str | int | float | bool | None):
        return value
    return json.dumps(value, ensure_ascii=False)


def store_uri(home: Path) -> str:
    """Where records go: MLFLOW_TRACKING_URI if set, else the project's server or database.

    A relative path is one of the project's folder: an isolated run has another working directory,
    which is removed later.
    """
    uri = os.environ.get(TRACKING_URI, "")
    if uri.startswith(SQLITE):
        database = make_url(uri).database or ":memory:"
        if not database.startswith(("/", ":memory:", "file:")):
            _, mark, query = uri.partition("?")
            return f"{sqlite_uri(home.parent / database)}{mark}{query}"
    if uri:
        return uri
    servers = running_mlflow(home)
    return servers.mlflow if servers else sqlite_uri(home / MLFLOW_DATABASE)


@contextmanager
def registry(home: Path) -> Iterator[MlflowClient]:
    """A client of the store that `MlflowTracker` sends records to.

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
