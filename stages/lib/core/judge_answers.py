"""Whether the language models' answers that an evaluation was made with are still in their cache.

Another model may answer at the same address, which no hash shows. To have it asked again, a person
deletes the cache; then the evaluation that used its answers is no longer up to date here. A clone
that has never asked has no mark, and takes the results as they are.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from secrets import randbelow

from stages.lib.core.files import JUDGE_CACHE, read_json, work_dir, write_json

ANSWERS = "answers.sqlite"  # in JUDGE_CACHE
EVALUATE = "evaluate"


def name_cache(table: sqlite3.Connection) -> None:
    """Give a new cache its id, a number that SQLite keeps for the user of a file."""
    [(number,)] = table.execute("PRAGMA user_version")
    if not number:
        table.execute(f"PRAGMA user_version = {1 + randbelow(2**31 - 1)}")


def cache_id() -> int | None:
    """The id of the cache; None if there is none."""
    if not (JUDGE_CACHE / ANSWERS).exists():
        return None
    with closing(sqlite3.connect(JUDGE_CACHE / ANSWERS)) as table:
        [(number,)] = table.execute("PRAGMA user_version")
    return int(number)


def _mark(round_: str) -> Path:
    return work_dir(round_, EVALUATE) / "answers.json"


def record_answers(round_: str, has_answers: bool) -> None:
    """Record the cache with the answers of an evaluation.

    has_answers: a language model is among its judges.
    """
    if has_answers:
        write_json(_mark(round_), {"cache": cache_id()})
    else:
        _mark(round_).unlink(missing_ok=True)


def answers_are_gone(address: str) -> bool:
    """Whether the stage at a DVC address, e.g. `evaluate@r0`, used answers that are gone."""
    stage, _, round_ = address.partition("@")
    path = _mark(round_)
    if stage != EVALUATE or not path.exists():
        return False
    return bool(read_json(path, f"rm {path}").get("cache") != cache_id())
