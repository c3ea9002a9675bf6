"""`python -m flows.orchestration.prefect_server server start ...`: Prefect's command line, for a
server whose SQLite transactions wait for each other, whose database is made completely or not at
all, and with a link that logs a browser in.

Prefect 3.8.8 begins most transactions with BEGIN DEFERRED. Such a transaction reads, and asks for
the write lock with its first INSERT. If another connection has committed in between, SQLite
reports "database is locked" at once: no busy timeout helps a transaction that has read old data.
The server then answers 503. Prefect's own client repeats the request, its pages do not: they show
"Oops. Something went wrong". The form of a deployment is hit most, because the server validates
the parameters for half a second between its read and its INSERT.

BEGIN IMMEDIATE takes the write lock first, and waits for it (Prefect sets 60 s).

Prefect's pages ask for the string of PREFECT_SERVER_API_AUTH_STRING, and keep it in the browser's
local storage. The page /rondo#STRING puts it there. A browser sends what follows the # to no
server, and the page leaves no entry in the browser's history.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from prefect.server.api import server
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.settings import PREFECT_HOME
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

from flows.core.databases import make_or_exit

_begin_transaction = AioSqliteConfiguration.begin_transaction
_create_ui_app = server.create_ui_app

LOGIN_PAGE = """<!DOCTYPE html><title>Rondo</title><script>
localStorage.setItem("prefect-password", btoa(location.hash.slice(1)))
location.replace("/deployments")
</script>"""


def begin_immediate(
    configuration: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
    """Begin a transaction that holds the write lock from its start.

    Replaces AioSqliteConfiguration.begin_transaction.
    """
    return _begin_transaction(configuration, session, with_for_update=True)


def ui_app_with_login(ephemeral: bool) -> FastAPI:
    """Prefect's pages and /rondo. Replaces create_ui_app."""
    pages = _create_ui_app(ephemeral)
    pages.get("/rondo")(login_page)
    return pages


def login_page() -> HTMLResponse:
    return HTMLResponse(LOGIN_PAGE)


def make_tables(database: Path) -> None:
    """Make Prefect's tables in a new SQLite database."""
    with temporary_database_config(AioSqliteConfiguration(f"sqlite+aiosqlite:///{database}")):
        asyncio.run(provide_database_interface().create_db())


def main() -> None:
    from prefect.cli import app

    make_or_exit(PREFECT_HOME.value() / "prefect.db", make_tables, "prefect")
    configuration: Any = AioSqliteConfiguration
    configuration.begin_transaction = begin_immediate
    server.create_ui_app = ui_app_with_login
    app()


if __name__ == "__main__":
    main()
