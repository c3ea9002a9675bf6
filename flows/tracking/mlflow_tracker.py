"""Mirrors a pipeline run to MLflow while it runs.

The files of a stage are read and written to the outbox at once. A thread sends them, so that no
stage waits for MLflow. If MLflow is unreachable, the stages continue: the records stay in
`.rondo/outbox` and are sent later, also by later runs.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event, Thread

from flows.core.services import MLFLOW_URL, WORKFLOW, LogLine, without_credentials
from flows.tracking.mlflow_store import (
    OFF,
    TRACKING_URI,
    MlflowStore,
    cause,
    store_uri,
)
from flows.tracking.null_tracker import NullTracker
from flows.tracking.outbox import Outbox
from flows.tracking.records import Record, milliseconds, read_record, read_steps

EVERY_SECONDS = 10.0  # between two readings of a stage's metrics
PAUSE_SECONDS = 60.0  # without tries, after MLflow was unreachable
PAGE_SECONDS, CLOSE_SECONDS = 10.0, 60.0  # the longest that a page's URL, and the end, wait


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
    ) -> None:
        """Register the pipeline run with MLflow.

        Args:
            run: the name of the pipeline run.
            uri: of the MLflow server or database.
            home: the .rondo folder.
            tags: of the pipeline run and of all its stages.
            log: is called with each message.
            local: whether the store belongs to this machine; then artifacts are kept in `home`.
        """
        self.run, self.uri, self.tags, self.log = run, uri, dict(tags), log
        self.artifacts = home / "mlartifacts" if local else None
        self.outbox = Outbox(home / "outbox")
        self.outbox.take_over(home / "unsent.jsonl")
        self.store: MlflowStore | None = None
        self.warned = False
        self.address, self.next_time, self.paused_until = "", 0.0, 0.0  # of time.monotonic()
        self.sent_lines: dict[str, int] = {}  # of metrics.jsonl, by address
        self.jobs: Queue[Callable[[], object] | None] = Queue()
        self.thread = Thread(target=self._work, name="mlflow", daemon=True)
        self.thread.start()
        now = milliseconds()
        self.send(Record(run=run, started=now, ended=now, tags=self.tags))

    def start(self, address: str) -> None:
        self.address, self.next_time = address, time.monotonic() + EVERY_SECONDS
        self.sent_lines[address] = 0

    def progress(self) -> None:
        if time.monotonic() >= self.next_time and self.jobs.empty():
            self.jobs.put(partial(self._send_steps, self.address))
            self.next_time = time.monotonic() + EVERY_SECONDS

    def finish(self, outcome: str) -> None:
        self.send(read_record(self.run, self.address, outcome, self.tags))

    def page(self, address: str = "", text: str = "") -> str | None:
        if time.monotonic() >= self.paused_until:
            self.flush(PAGE_SECONDS)
        run_id = self.store.runs.get((self.run, address)) if self.store else None
        if self.uri.startswith("http"):
            server: str | None = without_credentials(self.uri)
        else:  # the local database, which `rondo up` serves
            server = MLFLOW_URL if self.artifacts else None
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

    def close(self, passed: bool, texts: Mapping[str, str], seconds: float = CLOSE_SECONDS) -> None:
        now = milliseconds()
        status = "FINISHED" if passed else "FAILED"
        self.paused_until = 0.0
        self.send(Record(run=self.run, status=status, started=now, ended=now, texts=dict(texts)))
        self.jobs.put(None)
        self.thread.join(seconds)
        if waiting := self.outbox.waiting():
            self.log(
                f"MLflow is missing {len(waiting)} records: {self.outbox.folder} is sent with the "
                "next run"
            )

    def _work(self) -> None:
        """Do the jobs one after the other, until None."""
        while job := self.jobs.get():
            try:
                job()
            except Exception as error:
                self.paused_until = time.monotonic() + PAUSE_SECONDS
                if not self.warned:
                    self.log(
                        f"MLflow at {without_credentials(self.uri)} failed ({cause(error)}); "
                        f"the run continues, and {self.outbox.folder} is sent later"
                    )
                self.warned = True

    def _send_waiting(self) -> None:
        if time.monotonic() >= self.paused_until:
            store = self._open_store()
            for message in self.outbox.send(store.send, store.is_reachable):
                self.log(message)

    def _send_steps(self, address: str) -> None:
        steps = read_steps(address, self.sent_lines[address])
        if steps and time.monotonic() >= self.paused_until:
            self._open_store().send_steps(self.run, address, steps[0].time, steps)
            self.sent_lines[address] += len({step.step for step in steps})

    def _open_store(self) -> MlflowStore:
        self.store = self.store or MlflowStore(self.uri, self.artifacts)
        return self.store


def open_tracker(run: str, home: Path, tags: Mapping[str, str], log: LogLine) -> NullTracker:
    """The tracker of a run: see `store_uri`; `MLFLOW_TRACKING_URI=off` switches tracking off."""
    uri = store_uri(home)
    if uri == OFF:
        return NullTracker()
    return MlflowTracker(run, uri, home, tags, log, local=not os.environ.get(TRACKING_URI))
