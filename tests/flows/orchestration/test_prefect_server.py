"""Transactions of Prefect's server on SQLite: one that reads first does not fail when another
writes meanwhile.
"""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from flows.orchestration.prefect_server import begin_immediate

COUNT, INCREMENT = sqlalchemy.text("SELECT n FROM t"), sqlalchemy.text("UPDATE t SET n = n + 1")


async def two_increments(file: Path) -> int:
    """The number after two transactions, of which the second starts while the first has read and
    not yet written.
    """
    configuration = AioSqliteConfiguration(f"sqlite+aiosqlite:///{file}")
    engine = await configuration.engine()
    has_read = asyncio.Event()

    async def first() -> None:
        async with (
            await configuration.session(engine) as session,
            configuration.begin_transaction(session),
        ):
            await session.execute(COUNT)
            has_read.set()
            await asyncio.wait([other], timeout=0.5)  # it ends here, or waits for this one
            await session.execute(INCREMENT)

    async def second() -> None:
        await has_read.wait()
        async with (
            await configuration.session(engine) as session,
            configuration.begin_transaction(session),
        ):
            await session.execute(INCREMENT)

    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("CREATE TABLE t AS SELECT 0 AS n"))
    other = asyncio.create_task(second())
    try:
        await first()
        await other
        async with engine.connect() as connection:
            return int((await connection.execute(COUNT)).scalar_one())
    finally:
        await engine.dispose()


def test_a_write_in_between_is_waited_for(tmp_path: Path) -> None:
    event.listen(Engine, "before_cursor_execute", begin_immediate, retval=True)
    try:
        assert asyncio.run(two_increments(tmp_path / "prefect.db")) == 2
    finally:
        event.remove(Engine, "before_cursor_execute", begin_immediate)


def test_prefect_alone_answers_database_is_locked(tmp_path: Path) -> None:
    """The reason for `begin_immediate`: if this fails, it can go."""
    with pytest.raises(OperationalError, match="database is locked"):
        asyncio.run(two_increments(tmp_path / "prefect.db"))
