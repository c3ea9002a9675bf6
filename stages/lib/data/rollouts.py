"""The log of all episodes of a PPO run: `rollouts/00001.jsonl.gz`, `00002.jsonl.gz`, ...

The ppo stage appends after each update and starts a new file when one is full; battery and replay
read the log.
"""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.lib.core.errors import BadInput, start_again
from stages.lib.core.rows import RolloutRow, iter_rows

FULL = 64 << 20  # bytes of a file from which the next one is started


class RolloutLog:
    """Appends rows to the log in `folder`.

    `position` is the end of the log. A run that resumes opens the log at the position that it
    saved, which removes the rows written after that.

    Args:
        folder: the folder of the log.
        start: the position at which to open it; the default is an empty log.
        full: bytes of a file from which the next one is started.
        writes: whether this process writes the files; several that share a stage have the same
            rows.
    """

    def __init__(
        self,
        folder: Path,
        start: tuple[int, int] = (1, 0),
        full: int = FULL,
        writes: bool = True,
    ) -> None:
        self.folder, self.full, self.writes = folder, full, writes
        self.part, self.size = start
        if writes:
            self._open()

    def _open(self) -> None:
        """Remove what was written after the start.

        Raises:
            BadInput: less was written: the file is damaged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.jsonl.gz")):
            if int(path.name.split(".")[0]) > self.part:
                path.unlink()
        with self.path.open("ab") as stream:
            if (size := stream.tell()) < self.size:
                raise BadInput(
                    f"{self.path}: {size} bytes, expected at least {self.size} from before the run "
                    f"was interrupted: damaged. {start_again(self.folder.parent)}"
                )
            stream.truncate(self.size)

    @property
    def path(self) -> Path:
        """The current file."""
        return self.folder / f"{self.part:05d}.jsonl.gz"

    @property
    def position(self) -> tuple[int, int]:
        """(number of the current file, its size in bytes)."""
        return self.part, self.size

    def append(self, rows: Iterable[RolloutRow]) -> None:
        """Write rows to disk before returning."""
        if not self.writes:
            return
        if self.size >= self.full:
            self.part, self.size = self.part + 1, 0
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # One gzip member per append, without a time stamp, so that equal runs make equal files
        with self.path.open("ab") as stream:
            stream.write(gzip.compress(text.encode(), mtime=0))
            self.size = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())  # before the resume state that refers to these rows


def read_rollouts(folder: Path) -> Iterator[RolloutRow]:
    """Read all rows one at a time, in the order in which they were appended: a long run has
    millions.

    Raises:
        BadInput: there is no log.
    """
    paths = sorted(folder.glob("*.jsonl.gz")) or [folder / "00001.jsonl.gz"]
    for path in paths:
        yield from iter_rows(RolloutRow, path)
