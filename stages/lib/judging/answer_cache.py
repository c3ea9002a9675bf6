"""A cache of language models' answers on disk: a rerun costs nothing and gets the same answers."""

import sqlite3
from pathlib import Path
from threading import Lock
from typing import NamedTuple

WAIT_SECONDS = 60  # for a lock that another process holds to write


class Answer(NamedTuple):
    """An answer with the tokens that the server counted; 0 if it does not count them."""

    text: str
    tokens_in: int
    tokens_out: int


class AnswerCache:
    """A table of answers by key, in a folder that threads and processes may share."""

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
            "CREATE TABLE IF NOT EXISTS answers "
            "(key TEXT PRIMARY KEY, text TEXT, tokens_in INTEGER, tokens_out INTEGER)"
        )

    def get(self, key: str) -> Answer | None:
        """The answer to a key, or None."""
        with self.lock:
            row = self.table.execute(
                "SELECT text, tokens_in, tokens_out FROM answers WHERE key = ?", (key,)
            ).fetchone()
        return Answer(*row) if row else None

    def put(self, key: str, answer: Answer) -> Answer:
        """Store an answer unless there is one already; return the stored one.

        Two threads may request the same answer at once: both then use the first one.
        """
        with self.lock:
            self.table.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (key, *answer))
        return self.get(key) or answer

    def remove(self, key: str) -> None:
        """Remove the answer to a key, if there is one."""
        with self.lock:
            self.table.execute("DELETE FROM answers WHERE key = ?", (key,))
