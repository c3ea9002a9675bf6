"""Mirrors a pipeline run to MLflow while it runs.

The files of a stage are read and written to the outbox at once. A thread sends them, so that no
stage waits for MLflow. A second thread uploads models, so that no record waits for a large file. If
MLflow is unreachable, the stages continue: the records stay in `.rondo/outbox` and are sent later,
also by later runs.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

from flows.core.run_locks import is_alive
from flows.core.services import (
    TRACKING_URI,
    WORKFLOW,
    LogLine,
    mlflow_pages,
    without_credentials,
)
from flows.execution.meter import Meter
from flows.tracking.mlflow_store import (
    OFF,
    MlflowStore,
    cause,
    may_pass,
    store_uri,
)
from flows.tracking.model_upload import ModelUpload
from flows.tracking.null_tracker import NullTracker
from flows.tracking.outbox import Outbox
from flows.tracking.provenance import PROJECT
from flows.tracking.records import Record, Status, milliseconds, read_record, read_steps
from stages.lib.core.errors import BadInput
from stages.lib.core.params.tracking import Upload
from stages.lib.core.progress import progress

EVERY_SECONDS = 10.0  # between two readings of a stage's metrics
PAUSE_SECONDS = 60.0  # without tries, after MLflow was unreachable
PAGE_SECONDS, CLOSE_SECONDS = 10.0, 120.0  # the longest that a page's URL, and the end, wait

Jobs = Queue[Callable[[], object] | None]


class MlflowTracker(NullTracker):
    """Mirrors a pipeline run to MLflow; that MLflow is unreachable is reported once."""

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
        """Register the pipeline run with MLflow.

        Args:
            run: the name of the pipeline run.
            uri: of the MLflow server or database.
            home: the .rondo folder.
            tags: of the pipeline run and of all its stages.
            log: is called with each message.
            local: whether the store is that of `home`; then artifacts are kept there, too.
            upload: the kinds of models whose files MLflow stores.
        """
        self.run, self.uri, self.tags, self.log = run, uri, dict(tags), log
        self.home, self.local, self.upload = home, local, upload
        self.outbox = Outbox(home / "outbox", Record)
        self.uploads = Outbox(home / "outbox/models", ModelUpload)
        self.outbox.take_over(home / "unsent.jsonl")
        self.store: MlflowStore | None = None
        self.warned, self.refusal = False, ""  # why this address never takes a record
        self.address, self.meter = "", Meter()  # of the running stage
        self.next_time, self.paused_until = 0.0, 0.0  # of time.monotonic()
        self.sent_lines: dict[str, int] = {}  # of metrics.jsonl, by address
        self.jobs, self.upload_jobs = Jobs(), Jobs()
        self.thread, self.upload_thread = (
            Thread(target=self._work, args=[jobs], name="mlflow", daemon=True)
            for jobs in (self.jobs, self.upload_jobs)
        )
        self.thread.start()
        self.upload_thread.start()

    def begin(self) -> None:
        self.jobs.put(self._end_killed)
        self._send_status("RUNNING", tags=self.tags)

    def wait(self) -> None:
        self._send_status("SCHEDULED")
        self.flush()

    def start(self, address: str, meter: Meter) -> None:
        self.address, self.meter = address, meter
        self.next_time = time.monotonic() + EVERY_SECONDS
        self.sent_lines[address] = 0

    def progress(self) -> None:
        if time.monotonic() >= self.next_time and self.jobs.empty():
            self.jobs.put(partial(self._send_steps, self.address, self._began()))
            self.next_time = time.monotonic() + EVERY_SECONDS

    def finish(self, outcome: str) -> None:
        record = read_record(self.run, self.address, outcome, self.tags, self.upload)
        record.started = self._began()
        record.ended = record.started + round(self.meter.seconds * 1000)
        self.send(record)

    def _began(self) -> int:
        """When the stage began to compute, in milliseconds since the epoch; now if it has not."""
        began = self.meter.began
        return milliseconds() if began is None else int(began * 1000)

    def page(self, address: str = "", text: str = "") -> str | None:
        if time.monotonic() >= self.paused_until:
            self.flush(PAGE_SECONDS)
        run_id = self.store.runs.get((self.run, address)) if self.store else None
        server = mlflow_pages(self.home)
        if not self.store or not run_id or not server:
            return None
        artifact = f"/artifacts/{text}" if text else ""
        return f"{server}/#/experiments/{self.store.experiment}/runs/{run_id}{artifact}?{WORKFLOW}"

    def send(self, record: Record) -> None:
        """Write the record to disk; the thread sends it after the records that wait already."""
        self.outbox.add(record)
        self.jobs.put(self._send_waiting)

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        done = Event()
        self.jobs.put(done.set)
        if self.thread.is_alive():
            done.wait(seconds)

    def close(
        self, status: Status, texts: Mapping[str, str], seconds: float = CLOSE_SECONDS
    ) -> None:
        self.paused_until = 0.0
        self._send_status(status, texts=dict(texts))
        self.finish_sending(seconds)

    def finish_sending(self, seconds: float = CLOSE_SECONDS) -> None:
        end = time.monotonic() + seconds
        # The records first: a record may ask for an upload.
        for jobs, thread in ((self.jobs, self.thread), (self.upload_jobs, self.upload_thread)):
            jobs.put(None)
            with progress("sending to MLflow"):
                thread.join(max(0.0, end - time.monotonic()))
        for outbox, subject in ((self.outbox, "records"), (self.uploads, "uploads of models")):
            if waiting := outbox.waiting():
                fate = "is sent with the next run"
                if self.refusal:
                    fate = f"cannot be sent to this address, and is kept. {self.refusal}"
                self.log(f"MLflow is missing {len(waiting)} {subject}: {outbox.folder} {fate}")

    def _send_status(self, status: Status, **fields: Any) -> None:
        """Send the state of the pipeline run."""
        now = milliseconds()
        self.send(Record(run=self.run, status=status, started=now, ended=now, **fields))

    def _end_killed(self) -> None:
        if time.monotonic() >= self.paused_until and (project := self.tags.get(PROJECT)):
            self._open_store().end_killed(project, partial(is_alive, self.home))

    def _work(self, jobs: Jobs) -> None:
        """Do the jobs one after the other, until None."""
        while job := jobs.get():
            try:
                job()
            except Exception as error:
                self.paused_until = time.monotonic() + PAUSE_SECONDS
                self.refusal = str(error) if isinstance(error, BadInput) else ""
                if self.refusal and not self.warned:
                    self.log(f"MLflow gets no record of this run. {self.refusal}")
                elif not self.warned:
                    self.log(
                        f"MLflow at {without_credentials(self.uri)} failed ({cause(error)}); "
                        f"the run continues, and {self.outbox.folder} is sent later"
                    )
                self.warned = True

    def _send_waiting(self) -> None:
        if time.monotonic() >= self.paused_until:
            store = self._open_store()

            def send(record: Record) -> None:
                for item in store.send(record):
                    self.uploads.add(item)

            for message in self.outbox.send(send, store.is_reachable, may_pass):
                self.log(message)
            if self.uploads.waiting() and self.upload_jobs.empty():
                self.upload_jobs.put(self._upload_waiting)

    def _upload_waiting(self) -> None:
        store = self._open_store()
        if time.monotonic() >= self.paused_until:
            for message in self.uploads.send(store.upload, store.is_reachable, may_pass):
                self.log(message)

    def _send_steps(self, address: str, began: int) -> None:
        steps = read_steps(address, self.sent_lines[address])
        if steps and time.monotonic() >= self.paused_until:
            self._open_store().send_steps(self.run, address, began, steps)
            self.sent_lines[address] += len({step.step for step in steps})

    def _open_store(self) -> MlflowStore:
        self.store = self.store or MlflowStore(self.uri, self.local)
        return self.store


def open_tracker(
    run: str,
    home: Path,
    tags: Mapping[str, str],
    log: LogLine,
    upload: Collection[Upload] = (),
) -> NullTracker:
    """The tracker of a run: see `store_uri`; `MLFLOW_TRACKING_URI=off` switches tracking off."""
    uri = store_uri(home)
    if uri == OFF:
        return NullTracker()
    local = not os.environ.get(TRACKING_URI)
    return MlflowTracker(run, uri, home, tags, log, local, upload)
