"""Mirrors pipeline runs to MLflow: what stages made is recorded in files, which can be sent again.

When a stage ends, the flow writes what MLflow gets of it (records.py) to
`.rondo/recorded/<run>/<stage>@<round>.json`; the run itself is `pipeline.json`. A thread sends
MLflow what it lacks, so that no stage waits for it. If MLflow is unreachable, the stages continue,
and the next run or `rondo sync` sends the rest. The files stay, so that `rondo sync` can send all
of them to any MLflow. A run in which nothing has changed since it was sent to this MLflow is not
looked at again by later runs: its file `sent`.
"""

import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread

from filelock import FileLock
from mlflow.exceptions import MlflowException

from flows.core.addresses import split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.run_locks import is_alive
from flows.core.services import (
    TRACKING_URI,
    WORKFLOW,
    LogLine,
    mlflow_pages,
    without_credentials,
)
from flows.execution.meter import Meter
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
from flows.tracking.provenance import PROJECT, project_id
from flows.tracking.records import (
    Record,
    Status,
    champion_digest,
    milliseconds,
    read_record,
    read_steps,
)
from stages.lib.core.errors import BadInput
from stages.lib.core.files import json_hash, stage_dir, write_text
from stages.lib.core.params.tracking import Upload
from stages.lib.core.progress import progress

RECORDED, SENT, LOCK = "recorded", "sent", "lock"
REFUSALS = (400, 404, 409)  # status of MLflow's answers to a record that it never takes
EVERY_SECONDS = 10.0  # between two readings of a stage's metrics
PAUSE_SECONDS = 60.0  # without tries, after MLflow was unreachable
PAGE_SECONDS, CLOSE_SECONDS = 10.0, 120.0  # the longest that a page's URL, and the end, wait


def record_path(home: Path, run: str, address: str = "") -> Path:
    """The file of a stage, or of the pipeline run."""
    return home / RECORDED / run / f"{address or PIPELINE}.json"


def save(home: Path, record: Record) -> None:
    write_text(record_path(home, record.run, record.address), record.model_dump_json())


def read(path: Path) -> Record | None:
    """A record; None if there is none, or its file is damaged."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def recorded(home: Path) -> list[Path]:
    """The folders of the recorded runs, oldest first."""
    return sorted({path.parent for path in (home / RECORDED).glob("*/*.json")})


def unsent(home: Path) -> list[Path]:
    """The folders of the runs of which MLflow lacks something, as far as this machine knows."""
    sent = {path.parent: path.read_text("utf-8") for path in (home / RECORDED).glob(f"*/{SENT}")}
    return [folder for folder in recorded(home) if sent.get(folder) != _state(folder)]


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
                record = read(path)
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
            state, pending = _state(folder), store.pending_models(folder.name)
            sources = {
                (checkpoint.name, checkpoint.digest): (record, checkpoint)
                for path in (_records(folder) if pending else ())
                if (record := read(path))
                for checkpoint in record.checkpoints
                if checkpoint.files
            }
            for model in pending:
                try:
                    store.upload(model, sources.get((str(model.name), model.tags["md5"])))
                except BadInput as error:
                    log(str(error))
                else:
                    yield f"{folder.name}: files of {model.name}"
            run = read(folder / f"{PIPELINE}.json")
            goes_on = run and run.status == "RUNNING"  # it may be killed
            if not goes_on and not _lacking(store, folder):
                write_text(folder / SENT, state)


def send_all(home: Path, log: LogLine) -> Iterator[str]:
    """`rondo sync`: send MLflow what it lacks of all recorded runs; yields what was sent.

    Raises:
        BadInput: tracking is switched off, or the address can never take a record.
        RondoError: MLflow is unreachable or failed.
    """
    uri = store_uri(home)
    if uri == OFF:
        raise BadInput(f"{TRACKING_URI} is `off`: unset it, or set it to the MLflow to send to")
    folders = recorded(home)
    with naming_failures(uri):
        store = MlflowStore(uri)
        yield from send_records(store, home, folders, log)
        model_registry.follow(store.client, champion_digest(), project_id(home))
        yield from upload_models(store, home, folders, log)


def _lacking(store: MlflowStore, folder: Path) -> list[tuple[Path, str]]:
    """The records of a run that MLflow does not have as they are, each with its hash."""
    hashes = {path: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in _records(folder)}
    runs = store.runs_of(folder.name)
    sent = {
        folder / f"{address or PIPELINE}.json": run.data.tags.get(RECORD)
        for address, run in runs.items()
    }
    return [(path, digest) for path, digest in hashes.items() if sent.get(path) != digest]


def _records(folder: Path) -> list[Path]:
    """The records of a run: its own, which has its start, then its stages' as they were written."""
    return sorted(
        folder.glob("*.json"), key=lambda path: (path.stem != PIPELINE, path.stat().st_mtime_ns)
    )


def _state(folder: Path) -> str:
    """A hash of MLflow's address and of the records as they are now."""
    times = [(path.name, path.stat().st_mtime_ns) for path in _records(folder)]
    return json_hash([os.environ.get(TRACKING_URI, ""), times])


def _end_killed(home: Path, folder: Path) -> None:
    """Record that a run was killed, if it goes on by its record, and its process does not live."""
    run = read(folder / f"{PIPELINE}.json")
    if run and run.status == "RUNNING" and not is_alive(home, run.run):
        run.status = "KILLED"
        run.ended = max(record.ended for path in _records(folder) if (record := read(path)))
        save(home, run)


class MlflowTracker:
    """Mirrors a pipeline run to MLflow, or does nothing if tracking is switched off.

    That MLflow is unreachable is reported once.
    """

    def __init__(
        self,
        run: str,
        uri: str,
        home: Path,
        tags: Mapping[str, str],
        log: LogLine,
        upload: Collection[Upload] = (),
    ) -> None:
        """Start the thread that sends.

        Args:
            run: the name of the pipeline run.
            uri: of the MLflow server or database, or OFF.
            home: the .rondo folder.
            tags: of the pipeline run and of all its stages.
            log: is called with each message.
            upload: the kinds of models whose files MLflow stores.
        """
        self.run, self.uri, self.home = run, uri, home
        self.tags, self.upload = dict(tags), upload
        self.name, self.params = "", dict[str, str]()  # of the pipeline run
        self.log_line, self.logged = log, set[str]()
        self.store: MlflowStore | None = None
        self.warned, self.refusal = False, ""  # why this address never takes a record
        self.stage: tuple[str, Meter] | None = None  # that runs
        self.sent_lines: dict[str, int] = {}  # of metrics.jsonl, by address
        self.champion = ""  # the md5 of the champion, when this was last read
        self.paused_until = 0.0  # of time.monotonic()
        # A request to send, done when the records are sent; None: send all that is left, and end
        self.requests = Queue[Event | None]()
        self.thread = Thread(target=self._work, name="mlflow", daemon=True)
        if uri != OFF:
            self.thread.start()

    def begin(self) -> None:
        """Call when the pipeline run begins, and when it goes on after a wait or an end."""
        if self.uri != OFF:
            with bookkeeping("finding the champion", self.log):
                self.champion = champion_digest()
            self._send_status("RUNNING")

    def wait(self) -> None:
        """Call when the pipeline run waits for a decision, and its process ends."""
        self._send_status("SCHEDULED")
        self.flush()

    def start(self, address: str, meter: Meter) -> None:
        """Call when a stage begins; `meter` measures the time in which it computes."""
        self.sent_lines[address], self.stage = 0, (address, meter)

    def finish(self, outcome: str) -> None:
        """Call when the stage ended: `ran`, `restored`, `unchanged`, `failed` or `cancelled`."""
        if self.uri == OFF:
            return
        assert self.stage
        (address, meter), self.stage = self.stage, None
        earlier = read(record_path(self.home, self.run, address))
        if outcome == "unchanged" and earlier and earlier.status == "FINISHED":
            return  # this run has recorded it before it waited, or was retried
        record = read_record(self.run, address, outcome, self.tags, self.upload)
        record.started = _began(meter)
        record.ended = record.started + round(meter.seconds * 1000)
        if record.promotion:
            self.champion = champion_digest()
        self.send(record)

    def page(self, address: str = "", text: str = "") -> str | None:
        """The URL of the page of a stage, of the pipeline run, or of one of its texts, if any."""
        if time.monotonic() >= self.paused_until:
            self.flush(PAGE_SECONDS)
        run_id = self.store.runs.get((self.run, address)) if self.store else None
        server = mlflow_pages(self.home)
        if not self.store or not run_id or not server:
            return None
        artifact = f"/artifacts/{text}" if text else ""
        return f"{server}/#/experiments/{self.store.experiment}/runs/{run_id}{artifact}?{WORKFLOW}"

    def send(self, record: Record) -> None:
        """Write the record to disk; the thread sends it."""
        if self.uri != OFF:
            save(self.home, record)
            self.requests.put(Event())

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all records so far are sent, at most this long."""
        done = Event()
        self.requests.put(done)
        if self.thread.is_alive():
            done.wait(seconds)

    def close(
        self,
        status: Status,
        texts: Mapping[str, str],
        tags: Mapping[str, str] = {},
        final: Mapping[str, float] = {},
        seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Call when the pipeline run ended.

        Args:
            texts: its report and summary by file name.
            tags: of the pipeline run alone.
            final: its metrics.
            seconds: the longest that this waits.
        """
        self._send_status(status, texts, tags, final)
        self.finish_sending(seconds)

    def finish_sending(self, seconds: float = CLOSE_SECONDS) -> None:
        """Call after the last record: wait, at most this long, until all is sent, models too."""
        if self.uri == OFF:
            return
        self.requests.put(None)
        with progress("sending to MLflow"):
            self.thread.join(seconds)
        lacking = [
            folder
            for folder in unsent(self.home)
            if folder.name == self.run or not is_alive(self.home, folder.name)
        ]
        if lacking:
            fate = "the next run or `rondo sync` sends the rest"
            if self.refusal:
                fate = f"they cannot be sent to this address. {self.refusal}"
            self.log(f"MLflow lacks records or models of {len(lacking)} runs: {fate}")

    def _send_status(
        self,
        status: Status,
        texts: Mapping[str, str] = {},
        tags: Mapping[str, str] = {},
        final: Mapping[str, float] = {},
    ) -> None:
        """Record the state of the pipeline run."""
        now, earlier = milliseconds(), read(record_path(self.home, self.run))
        self.send(
            Record(
                run=self.run,
                name=(earlier and earlier.name) or self.name,
                status=status,
                started=earlier.started if earlier else now,
                ended=now,
                # MLflow takes no other value of a param; `rondo run --continue` knows no preset
                params=(earlier and earlier.params) or self.params,
                tags={**self.tags, **tags},
                texts=dict(texts),
                final=dict(final),
            )
        )

    def _work(self) -> None:
        """Send what MLflow lacks, at each request, and the metrics of the running stage."""
        request: Event | None = Event()
        is_behind = False
        while request is not None:
            try:
                request = self.requests.get(timeout=EVERY_SECONDS)
                is_behind = True
            except Empty:
                request = Event()
            if request is None or time.monotonic() >= self.paused_until:
                try:
                    self.store = self.store or MlflowStore(self.uri)
                    self._send_steps(self.store)
                    is_behind = is_behind and not self._send_rest(self.store, request)
                except Exception as error:
                    self._report(error)
            if request:
                request.set()

    def _send_rest(self, store: MlflowStore, request: Event | None) -> bool:
        """Send all records, then the files of models until the next request.

        Returns:
            Whether nothing is left.
        """
        folders = unsent(self.home)
        for _ in send_records(store, self.home, folders, self.log, self.run):
            pass
        isolated = self.tags.get("isolated") == str(True)
        model_registry.follow(store.client, self.champion, self.tags.get(PROJECT), isolated)
        if request:
            request.set()
        for _ in upload_models(store, self.home, folders, self.log):
            self._send_steps(store)
            if not self.requests.empty():
                return False
        return True

    def _send_steps(self, store: MlflowStore) -> None:
        """Send the new metrics of the stage that runs."""
        if not self.stage:
            return
        address, meter = self.stage
        name, round_ = split_address(address)
        file = stage_dir(round_, name) / "metrics.jsonl"
        # an older file is that of an earlier run
        if meter.began is None or not file.exists() or file.stat().st_mtime < meter.began:
            return
        if steps := read_steps(address, self.sent_lines[address]):
            store.send_steps(self.run, address, _began(meter), steps)
            self.sent_lines[address] += len({step.step for step in steps})

    def _report(self, error: Exception) -> None:
        """Log an error, once, and pause."""
        self.paused_until = time.monotonic() + PAUSE_SECONDS
        self.refusal = str(error) if isinstance(error, BadInput) else ""
        if self.refusal and not self.warned:
            self.log(f"MLflow gets no record of this run. {self.refusal}")
        elif not self.warned:
            self.log(
                f"MLflow at {without_credentials(self.uri)} failed ({cause(error)}); the run "
                "continues, and what MLflow lacks is sent later"
            )
        self.warned = True

    def log(self, line: str) -> None:
        """Log a line, but no line twice: the thread finds the same at each try."""
        if line not in self.logged:
            self.logged.add(line)
            self.log_line(line)


def _began(meter: Meter) -> int:
    """When the stage began to compute, in milliseconds since the epoch; now if it has not."""
    return milliseconds() if meter.began is None else int(meter.began * 1000)
