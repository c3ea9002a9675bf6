"""Send records to MLflow: one parent run a pipeline run, a child run a stage and round, a
LoggedModel a checkpoint.

Runs are found again by their tags, and equal metrics are stored once, so sending a record twice
changes nothing. MLflow that is down stops no stage: what could not be sent stays in
`.rondo/unsent.jsonl` and goes with the next.
"""

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pandas
from filelock import FileLock
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
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID
from requests.exceptions import RequestException
from sqlalchemy.exc import SQLAlchemyError

from flows.core.services import MLFLOW_URL, WORKFLOW, is_up
from flows.tracking import model_registry
from flows.tracking.records import (
    Checkpoint,
    NullTracker,
    Record,
    Step,
    health,
    milliseconds,
    read_record,
    read_steps,
)
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import write_text

EXPERIMENT = "rondo"
EVERY_SECONDS = 10.0
MAX_METRICS, MAX_PARAMS = 1000, 100  # of one request, set by MLflow
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
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    given = os.environ.get(TRACKING_URI)
    mlflow.set_tracking_uri(uri)
    if (
        given is None
        # MLflow sets it, and the next run in this process, and all that it starts, would take it for a
        # person's wish
    ):
        os.environ.pop(TRACKING_URI, None)
    return MlflowClient(uri)


class MlflowStore:
    """An MLflow server or database; every call may raise one of FAILURES."""

    def __init__(self, uri: str, artifacts: Path | None) -> None:
        """`artifacts`: the folder for a new experiment's artifacts, None to leave that to the
        server.
        """
        self.client = connect(uri)
        found = self.client.get_experiment_by_name(EXPERIMENT)
        location = artifacts.as_uri() if artifacts else None
        self.experiment = (
            found.experiment_id if found else self.client.create_experiment(EXPERIMENT, location)
        )
        self.runs: dict[tuple[str, str], str] = {}

    def run_id(self, run: str, address: str, started: int) -> str:
        """The MLflow run of a stage (or, address ``, of the pipeline run), made when there is none."""
        key = (run, address)
        if key not in self.runs:
            tags = {"rondo.run": run, "rondo.address": address or "pipeline"}
            found = self.client.search_runs(
                [self.experiment], " and ".join(f"tags.`{k}` = '{v}'" for k, v in tags.items())
            )
            if address and not found:
                tags[MLFLOW_PARENT_RUN_ID] = self.run_id(run, "", started)
            made = (
                found[0]
                if found
                else self.client.create_run(self.experiment, started, tags, address or run)
            )
            self.runs[key] = made.info.run_id
        return self.runs[key]

    def send_steps(self, run: str, address: str, started: int, steps: Sequence[Step]) -> None:
        """To the stage's run; PPO's health to the pipeline run too, where MLflow lays those of
        several runs over each other.
        """
        self._log(self.run_id(run, address, started), steps)
        self._log(self.run_id(run, "", started), health(address, steps))

    def _log(self, run_id: str, steps: Sequence[Step]) -> None:
        for first in range(0, len(steps), MAX_METRICS):
            batch = [
                Metric(s.key, s.value, s.time, s.step) for s in steps[first : first + MAX_METRICS]
            ]
            self.client.log_batch(run_id, metrics=batch)

    def send(self, record: Record) -> None:
        run_id = self.run_id(record.run, record.address, record.started)
        params = [Param(key, value[:MAX_VALUE]) for key, value in record.params.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
        self.client.log_batch(
            run_id, tags=[RunTag(key, value[:MAX_VALUE]) for key, value in record.tags.items()]
        )
        last = max((step.step for step in record.steps), default=0)
        final = [
            Step(key=f"final/{key}", value=value, time=record.ended, step=last)
            for key, value in record.final.items()
        ]
        self.send_steps(record.run, record.address, record.started, [*record.steps, *final])
        if record.inputs:
            used = [InputTag(MLFLOW_DATASET_CONTEXT, "input")]
            found = [
                Dataset(d.path, d.digest, "local", json.dumps({"uri": d.path}))
                for d in record.inputs
            ]
            self.client.log_inputs(run_id, [DatasetInput(dataset, used) for dataset in found])
        for name, text in record.texts.items():
            self.client.log_text(run_id, text, name)
        if record.samples and "samples.json" not in [
            file.path for file in self.client.list_artifacts(run_id)
        ]:
            table = pandas.DataFrame(
                [{k: _cell(v) for k, v in row.items()} for row in record.samples]
            )
            self.client.log_table(run_id, table, "samples.json")
        outputs = self.client.get_run(run_id).outputs if record.checkpoints else None
        known = (
            {self.client.get_logged_model(each.model_id).name for each in outputs.model_outputs}
            if outputs
            else set()
        )
        for checkpoint in record.checkpoints:
            if checkpoint.name not in known:
                self._send_checkpoint(run_id, record, checkpoint)
        if record.status != "RUNNING":
            self.client.set_terminated(run_id, record.status, record.ended)
        if record.promotion:
            model_registry.promote(
                self.client, self.experiment, run_id, record.promotion, record.ended
            )

    def _send_checkpoint(self, run_id: str, record: Record, checkpoint: Checkpoint) -> None:
        model = mlflow.create_external_model(
            checkpoint.name,
            source_run_id=run_id,
            params={"path": checkpoint.path, "step": str(checkpoint.step)},
            tags={"md5": checkpoint.digest, "stage": checkpoint.stage, "rondo.run": record.run}
            | {
                name: record.tags[name]
                for name in ("round", "seed", "revision", "evaluation_id")
                if name in record.tags
            },
            model_type="checkpoint",
            experiment_id=self.experiment,
        )
        values = checkpoint.metrics.items()
        self.client.log_batch(
            run_id,
            [
                Metric(k, v, record.ended, checkpoint.step, model_id=model.model_id)
                for k, v in values
            ],
        )
        self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, checkpoint.step)])


def _cell(value: object) -> object:
    return (
        value
        if isinstance(value, str | int | float | bool | None)
        else json.dumps(value, ensure_ascii=False)
    )


class MlflowTracker(NullTracker):
    """Mirrors a pipeline run while it goes on. Says once when MLflow is away, and then keeps what
    it has to say.
    """

    def __init__(
        self,
        run: str,
        uri: str,
        home: Path,
        tags: Mapping[str, str],
        say: Callable[[str], None],
        local: bool = True,
    ) -> None:
        """`home` is the .rondo folder; `local`: the store is this machine's, with its artifacts in
        `home`.
        """
        self.run, self.uri, self.tags, self.say = run, uri, dict(tags), say
        self.unsent, self.artifacts = home / "unsent.jsonl", home / "mlartifacts" if local else None
        self.store: MlflowStore | None = None
        self.warned = False
        self.address, self.sent_lines, self.next_time = "", 0, 0.0
        now = milliseconds()
        self.send(Record(run=run, started=now, ended=now, tags=self.tags))

    def start(self, address: str) -> None:
        self.address, self.sent_lines, self.next_time = address, 0, time.monotonic() + EVERY_SECONDS

    def progress(self) -> None:
        if time.monotonic() < self.next_time:
            return
        steps = read_steps(self.address, self.sent_lines)
        if steps and self._try(
            lambda store: store.send_steps(self.run, self.address, steps[0].time, steps)
        ):
            self.sent_lines += len({step.step for step in steps})
        self.next_time = time.monotonic() + EVERY_SECONDS

    def finish(self, outcome: str) -> None:
        self.send(read_record(self.run, self.address, outcome, self.tags))

    def page(self, address: str = "", text: str = "") -> str | None:
        """Of our own database: where `rondo up` serves it."""
        run_id = self.store.runs.get((self.run, address)) if self.store else None
        server = (
            re.sub("//[^/@]*@", "//", self.uri)
            if self.uri.startswith("http")
            else MLFLOW_URL
            if self.artifacts
            else None
        )
        if not self.store or not run_id or not server:
            return None
        part = f"/artifacts/{text}" if text else ""
        return f"{server}/#/experiments/{self.store.experiment}/runs/{run_id}{part}?{WORKFLOW}"

    def close(self, passed: bool, texts: Mapping[str, str]) -> None:
        now = milliseconds()
        status = "FINISHED" if passed else "FAILED"
        self.send(Record(run=self.run, status=status, started=now, ended=now, texts=dict(texts)))
        if self.unsent.exists():
            self.say(
                f"MLflow has not got everything of this run: {self.unsent} is sent with the next run"
            )

    def send(self, record: Record) -> None:
        """Write the record down, then send everything that waits; what fails waits on."""
        self.unsent.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(
            self.unsent.with_suffix(".lock")
        ):  # runs beside each other keep theirs there too
            before = self.unsent.read_text(encoding="utf-8") if self.unsent.exists() else ""
            write_text(self.unsent, before + record.model_dump_json() + "\n")  # whole or not at all
            self._send_waiting()

    def _send_waiting(self) -> None:
        waiting = deque(
            self.unsent.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        )  # models write other line ends
        while waiting:
            first = Record.model_validate_json(waiting[0])
            if not self._try(lambda store, record=first: store.send(record)):  # type: ignore[misc]
                waiting.rotate(-1)  # one that MLflow rejects must not bar the way of the others
                break
            waiting.popleft()
        write_text(self.unsent, "".join(line + "\n" for line in waiting))
        if not waiting:
            self.unsent.unlink()

    def _try(self, action: Callable[[MlflowStore], None]) -> bool:
        try:
            self.store = self.store or MlflowStore(self.uri, self.artifacts)
            action(self.store)
            return True
        except FAILURES as error:
            if not self.warned:
                self.say(
                    f"MLflow at {self.uri} fails ({cause(error)}); the run goes on, and {self.unsent} is sent later"
                )
            self.warned = True
            return False


def open_tracker(
    run: str, home: Path, tags: Mapping[str, str], say: Callable[[str], None]
) -> NullTracker:
    """The tracker for MLFLOW_TRACKING_URI, else for our server when it answers, else for the
    database that it serves.

    `MLFLOW_TRACKING_URI=off` switches tracking off.
    """
    uri = store_uri(home)
    if uri == OFF:
        return NullTracker()
    return MlflowTracker(run, uri, home, tags, say, local=not os.environ.get(TRACKING_URI))


def store_uri(home: Path) -> str:
    if uri := os.environ.get(TRACKING_URI, ""):
        return uri
    return MLFLOW_URL if is_up(f"{MLFLOW_URL}/health") else f"sqlite:///{home / 'mlflow.db'}"


@contextmanager
def registry(home: Path) -> Iterator[MlflowClient]:
    """A client of the store that `open_tracker` sends to.

    Raises:
        BadInput: tracking is switched off, or there has been no run.
        RondoError: MLflow does not answer, or refuses.
    """
    uri, database = store_uri(home), home / "mlflow.db"
    if uri == OFF:
        raise BadInput(
            "MLFLOW_TRACKING_URI is `off`: unset it, or name the MLflow that has the runs"
        )
    if uri == f"sqlite:///{database}" and not database.exists():
        raise BadInput(f"{database} is missing: nothing was recorded here yet; `rondo run` does")
    try:
        yield connect(uri)
    except FAILURES as error:
        raise RondoError(
            f"MLflow at {uri} fails ({cause(error)}): start it, or set MLFLOW_TRACKING_URI to the one that answers"
        ) from None


def experiment_of(client: MlflowClient) -> str:
    """The id of Rondo's experiment.

    Raises:
        BadInput: there is none.
    """
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        raise BadInput("MLflow has no run of Rondo's: `rondo run` records one")
    return str(found.experiment_id)


def cause(error: Exception) -> str:
    return f"{(str(error).splitlines() or [type(error).__name__])[0]:.120}"
