"""`python -m flows.tracking.mlflow_server DATABASE server ...`: MLflow's command line, for a server
whose SQLite database is made completely or not at all.
"""

import sys
from pathlib import Path

from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

from flows.core.databases import make_or_exit
from flows.core.services import sqlite_uri


def make_tables(database: Path) -> None:
    """Make MLflow's tables, those of runs too, in a new SQLite database."""
    SqlAlchemyStore(sqlite_uri(database)).engine.dispose()


def main() -> None:
    from mlflow.cli import cli

    make_or_exit(Path(sys.argv.pop(1)), make_tables, "mlflow")
    cli()


if __name__ == "__main__":
    main()
