"""`python -m flows.orchestration.prefect_server PORT`: Prefect's server on loopback, whose SQLite
transactions wait for each other, whose database is made completely or not at all, and with Rondo's
own pages (own_pages.py).

Prefect 3.8.8 begins most transactions with BEGIN DEFERRED. Such a transaction reads, and asks for
the write lock with its first INSERT. If another connection has committed in between, SQLite
reports "database is locked" at once: no busy timeout helps a transaction that has read old data.
The server then answers 503, and Prefect's pages show "Oops. Something went wrong", e.g. after
*Submit* in the form of a deployment (https://github.com/PrefectHQ/prefect/issues/18934). BEGIN
IMMEDIATE takes the write lock first, and waits for it (Prefect sets 60 s).
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.settings import (
    PREFECT_HOME,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    get_current_settings,
)
from sqlalchemy import event
from sqlalchemy.engine import Engine

from flows.core.databases import make_or_exit
from flows.core.services import HOST
from flows.orchestration.own_pages import router


def begin_immediate(_: object, __: object, statement: str, parameters: Any, *___: object) -> Any:
    """The statement with which a transaction takes the write lock first; others as they are.

    A listener of SQLAlchemy's event `before_cursor_execute`.
    """
    return statement.replace("BEGIN DEFERRED", "BEGIN IMMEDIATE"), parameters


def sqlite_address(database: Path) -> str:
    return f"sqlite+aiosqlite:///{database}"


def make_tables(database: Path) -> None:
    """Make Prefect's tables in a new SQLite database."""
    with temporary_database_config(AioSqliteConfiguration(sqlite_address(database))):
        asyncio.run(provide_database_interface().create_db())


def main() -> None:
    database, named = PREFECT_HOME.value() / "prefect.db", PREFECT_SERVER_DATABASE_CONNECTION_URL
    if named.value() == sqlite_address(database):  # not that of a team's server
        make_or_exit(database, make_tables, "prefect")
    event.listen(Engine, "before_cursor_execute", begin_immediate, retval=True)
    app = create_app(ephemeral=get_current_settings().server.ephemeral.enabled, final=True)
    home, port = PREFECT_HOME.value().parent, int(sys.argv[1])
    own = router(home, port, PREFECT_SERVER_API_AUTH_STRING.value() or "")
    app.router.routes[:0] = own.routes  # before Prefect's pages, which answer every path
    uvicorn.run(app, host=HOST, port=port, log_level="warning")


if __name__ == "__main__":
    main()
