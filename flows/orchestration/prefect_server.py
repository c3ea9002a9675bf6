"""`python -m flows.orchestration.prefect_server server start ...`: Prefect's command line, for a
server whose SQLite transactions wait for each other.

Prefect 3.8.8 begins most transactions with BEGIN DEFERRED. Such a transaction reads, and asks for
the write lock with its first INSERT. If another connection has committed in between, SQLite
reports "database is locked" at once: no busy timeout helps a transaction that has read old data.
The server then answers 503. Prefect's own client repeats the request, its pages do not: they show
"Oops. Something went wrong". The form of a deployment is hit most, because the server validates
the parameters for half a second between its read and its INSERT.

BEGIN IMMEDIATE takes the write lock first, and waits for it (Prefect sets 60 s).
"""

from contextlib import AbstractAsyncContextManager
from typing import Any

from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

_begin_transaction = AioSqliteConfiguration.begin_transaction


def begin_immediate(
    configuration: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
    """Begin a transaction that holds the write lock from its start.

    Replaces AioSqliteConfiguration.begin_transaction.
    """
    return _begin_transaction(configuration, session, with_for_update=True)


def main() -> None:
    from prefect.cli import app

    configuration: Any = AioSqliteConfiguration
    configuration.begin_transaction = begin_immediate
    app()


if __name__ == "__main__":
    main()
