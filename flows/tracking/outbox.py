"""Records that MLflow does not have yet: one file per record in `.rondo/outbox`.

Records are sent in the order in which they were added, also those of earlier runs. A record that
cannot be read, or that MLflow rejects three times as invalid, moves to `.rondo/outbox/rejected`
with its reason, so that it holds up no other record. A failure that may pass, e.g. of a full disk
or an expired token, does not count. `.rondo/outbox/models` is a second outbox: the uploads of
models' files, which take longer and hold up no record.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

from filelock import FileLock
from pydantic import BaseModel

from flows.core.services import without_credentials
from stages.lib.core.files import write_text

TRIES = 3
Item = TypeVar("Item", bound=BaseModel)


class Outbox(Generic[Item]):
    """The folder with the records that were not sent; several processes may share it.

    The number before `.json` in a file's name counts the rejections.

    Args:
        folder: of the files.
        kind: the type of the records.
    """

    def __init__(self, folder: Path, kind: type[Item]) -> None:
        self.folder, self.rejected, self.kind = folder, folder / "rejected", kind

    def add(self, record: Item) -> None:
        """Write a record to disk."""
        self._add_text(record.model_dump_json())

    def take_over(self, file: Path) -> None:
        """Move the records of `file`, one per line, into the folder.

        Older versions of Rondo kept unsent records in one file.
        """
        if file.exists():
            # Not splitlines(): samples may contain other line separators.
            for line in file.read_text(encoding="utf-8").split("\n"):
                if line:
                    self._add_text(line)
            file.unlink()

    def waiting(self) -> list[Path]:
        """The files of the records, oldest first."""
        return sorted(self.folder.glob("*.json"))

    def send(
        self,
        send: Callable[[Item], None],
        is_reachable: Callable[[], bool],
        may_pass: Callable[[Exception], bool],
    ) -> Iterator[str]:
        """Send each waiting record once, and delete those that were sent.

        Args:
            send: sends a record; it raises an exception if it failed.
            is_reachable: tells a rejection from an outage, after `send` failed.
            may_pass: whether the server itself failed; then the record stays as it is.

        Yields:
            A message for each record that was moved to `rejected`.

        Raises:
            Exception: what `send` raised, if MLflow is not reachable or failed itself. The records
                stay.
        """
        failure: Exception | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):  # concurrent runs would send the same record twice
            for path in self.waiting():
                try:
                    record = self.kind.model_validate_json(path.read_bytes())
                except ValueError as error:
                    yield self._reject(path, f"not a record: {error}")
                    continue
                try:
                    send(record)
                except Exception as error:
                    if not is_reachable():
                        raise
                    if may_pass(error):
                        if failure:  # a second record: it is the server's fault
                            raise
                        failure = error
                        continue
                    name, rejections, _ = path.name.rsplit(".", 2)
                    if int(rejections) + 1 < TRIES:
                        path.rename(path.with_name(f"{name}.{int(rejections) + 1}.json"))
                    else:
                        reason = f"{type(error).__name__}: {error}"
                        yield self._reject(path, without_credentials(reason))
                else:
                    path.unlink()
        if failure:
            raise failure

    def _add_text(self, text: str) -> None:
        starts = [path.name.partition("-")[0] for path in self.waiting()]
        # the clock may have been set back since the last record
        last = max((int(start) for start in starts if start.isdecimal()), default=0)
        now = max(time.time_ns(), last + 1)
        write_text(self.folder / f"{now}-{uuid4().hex[:8]}.0.json", text)

    def _reject(self, path: Path, reason: str) -> str:
        self.rejected.mkdir(exist_ok=True)
        write_text(self.rejected / f"{path.stem}.reason.txt", reason + "\n")
        moved = path.rename(self.rejected / path.name)
        return f"MLflow does not get the record {moved}: {reason.splitlines()[0]}"
