"""The interface of a tracker, and the tracker of runs without tracking."""

from collections.abc import Mapping

from flows.execution.meter import Meter
from flows.tracking.records import Record, Status


class NullTracker:
    """A tracker that does nothing, for runs without tracking; the interface of MlflowTracker."""

    def begin(self) -> None:
        """Call when the pipeline run begins, and when it goes on after a wait or an end."""

    def start(self, address: str, meter: Meter) -> None:
        """Call when a stage begins; `meter` measures the time in which it computes."""

    def progress(self) -> None:
        """Call after each line that the stage printed."""

    def finish(self, outcome: str) -> None:
        """Call when the stage ended: `ran`, `restored`, `unchanged`, `failed` or `cancelled`."""

    def page(self, address: str = "", text: str = "") -> str | None:
        """The URL of a stage's page, or of the pipeline run, or of one of its texts.

        None if there is no page.
        """
        return None

    def send(self, record: Record) -> None:
        """Send a record that is not a stage of the pipeline."""

    def wait(self) -> None:
        """Call when the pipeline run waits for a decision, and its process ends."""

    def flush(self, seconds: float = 0.0) -> None:
        """Wait until all records so far are sent, at most this long."""

    def finish_sending(self, seconds: float = 0.0) -> None:
        """Call after the last record: wait, at most this long, until all is sent, models too."""

    def close(self, status: Status, texts: Mapping[str, str], seconds: float = 0.0) -> None:
        """Call when the pipeline run ended.

        Args:
            status: FINISHED, FAILED, or KILLED if it was cancelled.
            texts: its report and summary by file name.
            seconds: to wait, at most, until all records are sent.
        """
