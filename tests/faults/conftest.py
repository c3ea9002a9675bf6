"""The states of projects that all tests of a session share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.projects import State, States, states_of
from tests.faults.servers import MlflowServer, mlflow_server


@pytest.fixture
def states(
    built_once: Callable[..., Path],
    copy_tables: Callable[[Path], None],
    fast_processes: None,
) -> States:
    """A function that gives the state of a command in a chain."""

    def state(chain: str, name: str) -> State:
        return states_of(built_once, copy_tables, chain, name)

    return state


@pytest.fixture
def server(tmp_path: Path, empty_tables: Path) -> Iterator[MlflowServer]:
    """MLflow's server, not started yet."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    with mlflow_server(folder, empty_tables) as made:
        yield made
