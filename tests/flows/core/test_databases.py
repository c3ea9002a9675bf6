"""SQLite databases of the servers: made completely or not at all, and checked."""

import errno
import os
import re
import resource
import sqlite3
import subprocess
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from flows import cli
from flows.core.databases import check_database, make_database
from flows.core.services import PREFECT_DATABASE
from stages.lib.core.errors import BadInput, StorageFailed
from tests.paths import ROOT

# Its end leaves the row in SQLite's journal
MAKER = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA journal_mode = WAL")
database.execute("create table runs (name)")
database.execute("insert into runs values ('r0')")
database.commit()
os._exit(0)
"""


def make_runs(path: Path) -> None:
    with path.with_name("made").open("a") as made:
        made.write("x")
    subprocess.run([sys.executable, "-c", MAKER, path], check=True)
    assert path.with_name(f"{path.name}-wal").stat().st_size


def runs(path: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("select * from runs").fetchall()


def test_a_database_is_made_once_and_without_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "prefect.db"
    (tmp_path / "prefect.db.unfinished").write_text("of a killed process")
    (tmp_path / "prefect.db.unfinished-wal").write_text("of a killed process")
    make_database(path, make_runs)
    assert {file.name for file in tmp_path.iterdir()} == {"prefect.db", "prefect.db.lock", "made"}
    assert runs(path) == [("r0",)]
    make_database(path, make_runs)
    assert (tmp_path / "made").read_text() == "x"


def test_a_database_that_was_not_made_completely_is_none(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        make_runs(path)
        raise KeyboardInterrupt

    path = tmp_path / "mlflow.db"
    with pytest.raises(KeyboardInterrupt):
        make_database(path, fail)
    assert not path.exists()
    make_database(path, make_runs)
    assert runs(path) == [("r0",)]


def test_of_processes_that_start_at_once_one_makes_the_database(tmp_path: Path) -> None:
    with get_context("spawn").Pool(4) as pool:
        pool.starmap(make_database, [(tmp_path / "mlflow.db", make_runs)] * 4, chunksize=1)
    assert (tmp_path / "made").read_text() == "x"


def synchronous(path: Path) -> int:
    """0: SQLite does not wait for the disk; 2: at each commit, its default."""
    with closing(create_engine(f"sqlite:///{path}").connect()) as connection:
        return int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())


def test_only_a_database_that_is_being_made_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    seen = []

    def make(unfinished: Path) -> None:
        seen.extend(map(synchronous, [unfinished, tmp_path / "other.db"]))

    make_database(tmp_path / "mlflow.db", make)
    seen.extend(map(synchronous, [tmp_path / "mlflow.db", tmp_path / "mlflow.db.unfinished"]))
    assert seen == [0, 2, 2, 2]


def fill(path: Path) -> None:
    """A disk without room for more than ten pages, as SQLAlchemy reports it."""
    with create_engine(f"sqlite:///{path}").connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 10")
        connection.exec_driver_sql("create table runs (name)")
        connection.exec_driver_sql("insert into runs values (zeroblob(100000))")


def test_an_error_of_the_disk_names_the_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with pytest.raises(OSError) as full:
        make_database(path, fill)
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("prefect", ["flows.orchestration.prefect_server", "0"]),
        ("mlflow", ["flows.tracking.mlflow_server", "prefect.db", "--version"]),
    ],
)
def test_a_server_reports_an_error_of_the_disk_in_one_line(
    tmp_path: Path, name: str, arguments: list[str]
) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    server = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=limit_files,
    )
    assert server.returncode == StorageFailed.exit_code
    [line] = [line for line in server.stderr.splitlines() if "INFO" not in line]
    assert re.fullmatch(rf"{name}: StorageFailed: \[Errno 5\] .*prefect\.db'\. Next: look .*", line)


def test_a_database_is_checked_before_a_server_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "prefect.db"
    check_database(path)  # there is none yet
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table runs (name)")
        names = [[f"run {number}"] for number in range(2000)]
        database.executemany("insert into runs values (?)", names)
        database.commit()
        check_database(path)
        database.execute("begin exclusive")
        check_database(path)  # in use
        database.rollback()
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"no database" + content[11:]):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"^{path}: damaged \(.*Next: restore a copy, or"):
            check_database(path)


@pytest.mark.parametrize(
    ("command", "name"), [("run", PREFECT_DATABASE), ("up", PREFECT_DATABASE), ("up", "mlflow.db")]
)
def test_a_damaged_database_stops_a_command_before_it_starts_anything(
    project: Path, as_before: None, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    path = project / ".rondo" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("no database" * 100)
    assert cli.exit_code([command]) == 2
    assert f"BadInput: {path}: damaged" in capsys.readouterr().err
    assert not list(project.glob(".rondo/logs/*"))
