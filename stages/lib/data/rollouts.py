"""Every episode of a run, as `rollouts/00001.jsonl.gz` and on: appended update by update, a new
file when one is full.
"""

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path

from stages.lib.core.files import read_jsonl
from stages.lib.core.types import Row

FULL = 64 << 20  # bytes


class RolloutLog:
    """Appends rows; `place` is where the log ends, and a log opened at an earlier place forgets
    what came after it.

    An append is one gzip member with no time in it, so that equal runs make equal files.
    """

    def __init__(self, folder: Path, place: tuple[int, int] = (1, 0), full: int = FULL) -> None:
        self.folder, self.full = folder, full
        self.part, self.size = place
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.jsonl.gz")):
            if int(path.name.split(".")[0]) > self.part:
                path.unlink()
        with self.path.open("ab") as stream:
            stream.truncate(self.size)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.part:05d}.jsonl.gz"

    @property
    def place(self) -> tuple[int, int]:
        """(number of the current file, its bytes)."""
        return self.part, self.size

    def append(self, rows: Iterable[Row]) -> None:
        if self.size >= self.full:
            self.part, self.size = self.part + 1, 0
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self.path.open("ab") as stream:
            stream.write(gzip.compress(text.encode(), mtime=0))
            self.size = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())  # before the resume state says that it is there


def read_rollouts(folder: Path, made_by: str) -> list[Row]:
    """All rows, in the order in which they were appended.

    Raises:
        BadInput: there is no log; `made_by` is the command that makes it.
    """
    paths = sorted(folder.glob("*.jsonl.gz")) or [folder / "00001.jsonl.gz"]
    return [row for path in paths for row in read_jsonl(path, made_by)]
