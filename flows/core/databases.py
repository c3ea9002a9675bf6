"""The SQLite databases of Prefect's and MLflow's servers: made completely or not at all, and
checked before a server opens them.

Both servers make the tables of a new database in about a hundred migrations, some of several
commits. Neither can open a database in which it was killed between two of them.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from stages.lib.core.errors import BadInput, chain_of, print_failure, sqlite_errnos
from stages.lib.core.files import rename


def make_database(path: Path, make: Callable[[Path], None]) -> None:
    """Make a database, unless it exists, completely or not at all.

    Args:
        path: of the database.
        make: makes it at the path that it gets, and closes it.

    Raises:
        OSError: the disk is full, read-only or failing.
    """
    if path.exists():
        return
    with FileLock(f"{path}.lock"):  # several processes may start at once
        if path.exists():
            return
        unfinished = path.with_name(f"{path.name}.unfinished")
        for file in path.parent.glob(f"{unfinished.name}*"):  # with SQLite's journals
            file.unlink()
        try:
            with without_fsync(unfinished):
                make(unfinished)
        except Exception as error:
            if not (numbers := sqlite_errnos(" ".join(map(str, chain_of(error))))):
                raise
            raise OSError(numbers[0], os.strerror(numbers[0]), str(path)) from error
        with closing(sqlite3.connect(unfinished)) as database:  # so that no journal is left
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        rename(unfinished, path)


@contextmanager
def without_fsync(path: Path) -> Iterator[None]:
    """SQLAlchemy does not wait for the disk while it writes this database: MLflow's migrations
    would wait a thousand times.
    """
    # 0.2 s, for a new database only
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def set_pragma(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA database_list")
        [(_, _, file), *_] = cursor.fetchall()
        if Path(file) == path.resolve():
            cursor.execute("PRAGMA synchronous = OFF")
        cursor.close()

    event.listen(Engine, "connect", set_pragma)
    try:
        yield
    finally:
        event.remove(Engine, "connect", set_pragma)


def make_or_exit(path: Path, make: Callable[[Path], None], server: str) -> None:
    """As `make_database`, for the process of a server: it prints a typed error in one line."""
    try:
        make_database(path, make)
    except Exception as error:
        sys.exit(print_failure(error, server))


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
