"""MLflow's database, made by MLflow itself."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flows.tracking.mlflow_store import connect
from tests.paths import ROOT


def tables(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {name for [name] in connection.execute("select name from sqlite_master")}


@pytest.mark.parametrize("maker", ["client", "server"])
def test_the_tables_are_made_beside_the_database(
    maker: str, tmp_path: Path, empty_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database, unfinished = tmp_path / "mlflow.db", tmp_path / "mlflow.db.unfinished"
    unfinished.write_text("of a killed process")
    if maker == "client":
        connect(f"sqlite:///{database}")
    else:
        command = [sys.executable, "-m", "flows.tracking.mlflow_server", str(database), "--version"]
        subprocess.run(command, cwd=ROOT, check=True)
    assert tables(database) == tables(empty_tables)
    assert not unfinished.exists()
