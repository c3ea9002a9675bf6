"""Answers of language models on disk: what was asked once is known, so that a rerun costs nothing
and says the same.
"""

import sqlite3
from pathlib import Path
from threading import Lock
from typing import NamedTuple

WAIT_SECONDS = 60  # for another process that writes


class Answer(NamedTuple):
    """tokens_in, tokens_out: as the server counted them, 0 where it does not."""

    text: str
    tokens_in: int
    tokens_out: int


class AnswerCache:
    """A table of answers by key in `folder`; threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = Lock()
        self.table = sqlite3.connect(
            folder / "answers.sqlite",
            timeout=WAIT_SECONDS,
            check_same_thread=False,
            isolation_level=None,
        )
        self.table.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT, tokens_in INTEGER, tokens_out INTEGER)"
        )

    def get(self, key: str) -> Answer | None:
        with self.lock:
            row = self.table.execute(
                "SELECT text, tokens_in, tokens_out FROM answers WHERE key = ?", (key,)
            ).fetchone()
        return Answer(*row) if row else None

    def put(self, key: str, answer: Answer) -> Answer:
        """The answer that stands from now on: the first one, where two asked at once."""
        with self.lock:
            self.table.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (key, *answer))
        return self.get(key) or answer
