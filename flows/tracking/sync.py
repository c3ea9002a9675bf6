"""Send MLflow what it lacks of the recorded runs; calling it again changes nothing.

The flow records each stage when it ends, in `.rondo/recorded/<run>/<stage>@<round>.json`, and the
run itself in `pipeline.json`: what MLflow gets (records.py). The files stay, so that `rondo sync`
can send all of them to any MLflow. A run in which nothing has changed since it was sent to this
MLflow is not looked at again by later runs: its file `sent`.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from mlflow.exceptions import MlflowException

from flows.core.run_locks import is_alive
from flows.core.services import TRACKING_URI, LogLine
from flows.tracking import model_registry
from flows.tracking.mlflow_store import (
    OFF,
    PIPELINE,
    RECORD,
    MlflowStore,
    cause,
    naming_failures,
    store_uri,
)
from flows.tracking.model_upload import upload
from flows.tracking.models import Checkpoint, ModelCode
from flows.tracking.provenance import project_id
from flows.tracking.records import Record, champion_digest
from stages.lib.core.errors import BadInput
from stages.lib.core.files import json_hash, write_text

RECORDED, SENT, LOCK = "recorded", "sent", "lock"
REFUSALS = (400, 404, 409)  # status of MLflow's answers to a record that it never takes


def record_path(home: Path, run: str, address: str = "") -> Path:
    """The file of a stage, or of the pipeline run."""
    return home / RECORDED / run / f"{address or PIPELINE}.json"


def save(home: Path, record: Record) -> None:
    write_text(record_path(home, record.run, record.address), record.model_dump_json())


def read(home: Path, run: str, address: str = "") -> Record | None:
    """A record; None if there is none, or its file is damaged."""
    return _read(record_path(home, run, address))


def _read(path: Path) -> Record | None:
    try:
        return Record.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def recorded(home: Path) -> list[Path]:
    """The folders of the recorded runs, oldest first."""
    return sorted({path.parent for path in (home / RECORDED).glob("*/*.json")})


def unsent(home: Path) -> list[Path]:
    """The folders of the runs of which MLflow lacks something, as far as this machine knows."""
    return [folder for folder in recorded(home) if not _is_sent(folder)]


def send_records(
    store: MlflowStore, home: Path, folders: list[Path], log: LogLine, running: str = ""
) -> Iterator[str]:
    """Send the records that MLflow lacks, and yield a line for each run that had some.

    Args:
        home: the .rondo folder.
        running: the run of this process. Another one that has no process was killed.
    """
    refused: list[str] = []
    with FileLock(home / RECORDED / LOCK):
        for folder in folders:
            number = 0
            if folder.name != running:
                _end_killed(home, folder)
            for path, digest in _lacking(store, folder):
                record = _read(path)
                if record is None:
                    refused.append(f"{path}: the file is damaged")
                    continue
                try:
                    store.send(record, digest)
                    number += 1
                except MlflowException as error:
                    if error.get_http_status_code() not in REFUSALS:
                        raise
                    refused.append(f"{path}: {cause(error)}")
            if number:
                yield f"{folder.name}: {number} records"
    if refused:
        log(f"MLflow does not take {len(refused)} records (delete them to end this), {refused[0]}")


def upload_models(
    store: MlflowStore, home: Path, folders: list[Path], log: LogLine
) -> Iterator[str]:
    """Upload the files of the models that MLflow lacks, and yield a line for each model."""
    with FileLock(home / RECORDED / LOCK):
        for folder in folders:
            state = _state(folder)
            for model in store.pending_models(folder.name):
                name = str(model.name)
                try:
                    upload(store, model, *_model_of(folder, name))
                except BadInput as error:
                    log(str(error))
                else:
                    yield f"{folder.name}: files of {name}"
            run = read(home, folder.name)
            goes_on = run and run.status == "RUNNING"  # it may be killed
            if not goes_on and not _lacking(store, folder):
                write_text(folder / SENT, state)


def send_all(home: Path, log: LogLine) -> Iterator[str]:
    """`rondo sync`: send MLflow what it lacks of all recorded runs; yields what was sent.

    Raises:
        BadInput: tracking is switched off, or the address can never take a record.
        RondoError: MLflow is unreachable or failed.
    """
    uri, local = store_uri(home), not os.environ.get(TRACKING_URI)
    if uri == OFF:
        raise BadInput(f"{TRACKING_URI} is `off`: unset it, or set it to the MLflow to send to")
    folders = recorded(home)
    with naming_failures(uri):
        store = MlflowStore(uri, local)
        yield from send_records(store, home, folders, log)
        model_registry.follow(store.client, champion_digest(), project_id(home))
        yield from upload_models(store, home, folders, log)


def _lacking(store: MlflowStore, folder: Path) -> list[tuple[Path, str]]:
    """The records of a run that MLflow does not have as they are, each with its hash."""
    digests = {
        path: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in _records(folder)
    }
    tags = {address: run.data.tags for address, run in store.runs_of(folder.name).items()}
    return [
        (path, digest)
        for path, digest in digests.items()
        if tags.get(path.stem.removeprefix(PIPELINE), {}).get(RECORD) != digest
    ]


def _records(folder: Path) -> list[Path]:
    """The records of a run: its own, which has its start, then its stages' as they were written."""
    return sorted(
        folder.glob("*.json"), key=lambda path: (path.stem != PIPELINE, path.stat().st_mtime_ns)
    )


def _state(folder: Path) -> str:
    """A hash of MLflow's address and of the records as they are now."""
    times = [(path.name, path.stat().st_mtime_ns) for path in _records(folder)]
    return json_hash([os.environ.get(TRACKING_URI, ""), times])


def _is_sent(folder: Path) -> bool:
    sent = folder / SENT
    return sent.exists() and sent.read_text() == _state(folder)


def _end_killed(home: Path, folder: Path) -> None:
    """Record that a run was killed, if it goes on by its record, and its process does not live."""
    run = read(home, folder.name)
    if run and run.status == "RUNNING" and not is_alive(home, run.run):
        records = [record for path in _records(folder) if (record := _read(path))]
        run.status, run.ended = "KILLED", max(record.ended for record in records)
        save(home, run)


def _model_of(folder: Path, name: str) -> tuple[Checkpoint, ModelCode]:
    """The recorded model with this name whose files MLflow stores, and its code.

    Raises:
        BadInput: there is none.
    """
    for record in filter(None, map(_read, _records(folder))):
        for checkpoint in record.checkpoints:
            if record.code and checkpoint.files and checkpoint.name == name:
                return checkpoint, record.code
    raise BadInput(f"{folder} has no files of {name}")
