"""Mirrors a pipeline run to MLflow while it runs.

What a stage made is recorded in files when it ends (sync.py). A thread sends MLflow what it lacks,
so that no stage waits for it. If MLflow is unreachable, the stages continue, and the next run or
`rondo sync` sends the rest.
"""

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

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
from flows.tracking import model_registry, sync
from flows.tracking.mlflow_store import OFF, MlflowStore, cause, store_uri
from flows.tracking.provenance import PROJECT
from flows.tracking.records import (
    Record,
    Status,
    champion_digest,
    milliseconds,
    read_record,
    read_steps,
)
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir
from stages.lib.core.params.tracking import Upload
from stages.lib.core.progress import progress

EVERY_SECONDS = 10.0  # between two readings of a stage's metrics
PAUSE_SECONDS = 60.0  # without tries, after MLflow was unreachable
PAGE_SECONDS, CLOSE_SECONDS = 10.0, 120.0  # the longest that a page's URL, and the end, wait


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
        local: bool = True,
        upload: Collection[Upload] = (),
    ) -> None:
        """Start the thread that sends.

        Args:
            run: the name of the pipeline run.
            uri: of the MLflow server or database, or OFF.
            home: the .rondo folder.
            tags: of the pipeline run and of all its stages.
            log: is called with each message.
            local: whether the store is that of `home`; then artifacts are kept there, too.
            upload: the kinds of models whose files MLflow stores.
        """
        self.run, self.uri, self.tags = run, uri, dict(tags)
        self.log_line, self.logged = log, set[str]()
        self.home, self.local, self.upload = home, local, upload
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
        if self.uri == OFF:
            return
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
        earlier = sync.read(self.home, self.run, address)
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
            sync.save(self.home, record)
            self.requests.put(Event())

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all records so far are sent, at most this long."""
        done = Event()
        self.requests.put(done)
        if self.thread.is_alive():
            done.wait(seconds)

    def close(
        self, status: Status, texts: Mapping[str, str], seconds: float = CLOSE_SECONDS
    ) -> None:
        """Call when the pipeline run ended, with its report and summary by file name."""
        self._send_status(status, texts=dict(texts))
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
            for folder in sync.unsent(self.home)
            if folder.name == self.run or not is_alive(self.home, folder.name)
        ]
        if lacking:
            fate = f"they cannot be sent to this address. {self.refusal}"
            if not self.refusal:
                fate = "the next run or `rondo sync` sends the rest"
            self.log(f"MLflow lacks records or models of {len(lacking)} runs: {fate}")

    def _send_status(self, status: Status, **fields: Any) -> None:
        """Record the state of the pipeline run."""
        now, earlier = milliseconds(), sync.read(self.home, self.run)
        started = earlier.started if earlier else now
        record = Record(run=self.run, status=status, started=started, ended=now, tags=self.tags)
        self.send(record.model_copy(update=fields))

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
                    self._send_steps()
                    is_behind = is_behind and not self._send_rest(request)
                except Exception as error:
                    self._report(error)
            if request:
                request.set()

    def _send_rest(self, request: Event | None) -> bool:
        """Send all records, then the files of models until the next request.

        Returns:
            Whether nothing is left.
        """
        store, folders = self._open_store(), sync.unsent(self.home)
        for _ in sync.send_records(store, self.home, folders, self.log, self.run):
            pass
        isolated = self.tags.get("isolated") == str(True)
        model_registry.follow(store.client, self.champion, self.tags.get(PROJECT), isolated)
        if request:
            request.set()
        for _ in sync.upload_models(store, self.home, folders, self.log):
            self._send_steps()
            if not self.requests.empty():
                return False
        return True

    def _send_steps(self) -> None:
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
            self._open_store().send_steps(self.run, address, _began(meter), steps)
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

    def _open_store(self) -> MlflowStore:
        self.store = self.store or MlflowStore(self.uri, self.local)
        return self.store


def _began(meter: Meter) -> int:
    """When the stage began to compute, in milliseconds since the epoch; now if it has not."""
    return milliseconds() if meter.began is None else int(meter.began * 1000)


def open_tracker(
    run: str,
    home: Path,
    tags: Mapping[str, str],
    log: LogLine,
    upload: Collection[Upload] = (),
) -> MlflowTracker:
    """The tracker of a run: see `store_uri`; `MLFLOW_TRACKING_URI=off` switches tracking off."""
    local = not os.environ.get(TRACKING_URI)
    return MlflowTracker(run, store_uri(home), home, tags, log, local, upload)
