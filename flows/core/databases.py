"""The SQLite databases of Prefect's and MLflow's servers: made completely or not at all, and
checked before a server opens them.

Both servers make the tables of a new database in about a hundred migrations, some of several
commits. Neither can open a database in which it was killed between two of them.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from filelock import FileLock

from stages.lib.core.errors import BadInput


def make_database(path: Path, make: Callable[[Path], None]) -> None:
    """Make a database, unless it exists, completely or not at all.

    Args:
        path: of the database.
        make: makes it at the path that it gets, and closes it.
    """
    if path.exists():
        return
    with FileLock(f"{path}.lock"):  # several processes may start at once
        if path.exists():
            return
        unfinished = path.with_name(f"{path.name}.unfinished")
        for file in path.parent.glob(f"{unfinished.name}*"):  # with SQLite's journals
            file.unlink()
        make(unfinished)
        with closing(sqlite3.connect(unfinished)) as database:  # so that no journal is left
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        unfinished.rename(path)


def check_database(path: Path) -> None:
    """Check that SQLite can read the database of a server, if there is one.

    Raises:
        BadInput: it is damaged.
    """
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=1)) as database:
            [answer] = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # another process has locked it: it is in use
        return
    except sqlite3.DatabaseError as error:
        answer = str(error)
    if answer != "ok":
        raise BadInput(
            f"{path}: damaged ({answer}). Next: restore a copy, or delete it: the pages of earlier "
            "runs are lost then, the results are not"
        )
