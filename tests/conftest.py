"""A tiny Llama that every test of models shares: random, float32, 2 layers. And how tests run
beside each other.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from flows.core.services import prefect_environment
from flows.execution import fork_server
from tests.clones import clone_of_working_tree
from tests.paths import ROOT

SLOWEST = (  # the slowest first
    "test_up.py",
    "test_end_to_end.py",
    "test_pipeline.py",
    "test_interrupts.py",
    "test_reward_defects.py",
)
torch.set_num_threads(1)  # a second thread costs tiny models more than it gives
os.environ.setdefault("OMP_NUM_THREADS", "1")  # nor do the stages that tests start need one
# DVC would look at the files of all imported modules, and send what it was called for
os.environ.setdefault("DVC_NO_ANALYTICS", "true")
# A runner in the background, e.g. of `nohup`, ignores these signals, and so would the programs that
# tests start and then send them to.
# DVC restores only a handler of SIGINT that is true, which SIG_DFL is not.
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for signal_number, handler in HANDLERS.items():
    if signal.getsignal(signal_number) == signal.SIG_IGN:
        signal.signal(signal_number, handler)

MAKE_TABLES = """
import pathlib, sys
from flows.core.databases import make_database
from flows.orchestration.prefect_server import make_tables
make_database(pathlib.Path(sys.argv[1]), make_tables)
"""
TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "grouped",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes first, so that no worker is left with one at the end."""
    order = {name: position for position, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(SLOWEST)))


@pytest.fixture(autouse=True)
def forget_modules_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test writes and imports is that test's alone: the next one may write another
    of the same name.
    """
    known = {*sys.modules}
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in {*sys.modules} - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that has a folder built once in a session, by the first worker that needs it, and
    returns it. Tests work on copies.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def build_once(name: str, build: Callable[[Path], None]) -> Path:
        built, done = folder / name, folder / f"{name}.done"
        with FileLock(folder / f"{name}.lock"):
            if not done.exists():
                built.mkdir()
                build(built)
                done.touch()
        return built

    return build_once


@pytest.fixture(scope="session")
def forking_python() -> Iterator[str]:
    """The stand-in for the interpreter of a fork server that all tests of a worker share: it
    imports torch and TRL once, so that a process starts in 0.1 s and not in 5 to 9 s.
    """
    folders = f"{ROOT / 'tests/faults/killed'}:{ROOT}"
    with fork_server.fork_server({"PYTHONPATH": folders}):
        yield os.environ.pop(fork_server.VARIABLE, sys.executable)


@pytest.fixture
def fast_processes(forking_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and fresh processes of this test start by that server."""
    monkeypatch.setenv(fork_server.VARIABLE, forking_python)


@pytest.fixture(scope="session")
def empty_tables(built_once: Callable[..., Path]) -> Path:
    """MLflow's tables without an experiment of ours. Making them takes seconds, a copy none."""

    def build(folder: Path) -> None:
        from mlflow import MlflowClient  # takes seconds, and few tests need it

        MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()

    return built_once("tables", build) / "mlflow.db"


@pytest.fixture(scope="session")
def prefect_tables(built_once: Callable[..., Path]) -> Path:
    """Prefect's tables without a flow run; they take seconds too."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-c", MAKE_TABLES, folder / "prefect/prefect.db"]
        environment = os.environ | prefect_environment(folder)
        subprocess.run(command, cwd=ROOT, env=environment, check=True)

    return built_once("prefect_tables", build) / "prefect/prefect.db"


@pytest.fixture(scope="session")
def copy_tables(empty_tables: Path, prefect_tables: Path) -> Callable[[Path], None]:
    """A function that gives a project the two databases that its first run would make."""

    def copy(project: Path) -> None:
        (project / ".rondo/prefect").mkdir(parents=True)
        shutil.copy(prefect_tables, project / ".rondo/prefect")
        shutil.copy(empty_tables, project / ".rondo")

    return copy


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return clone_of_working_tree(tmp_path / "clone")


@pytest.fixture
def tiny_lm() -> Callable[..., Any]:
    def build(seed: int = 0, spread: float = 0.2) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=spread)).eval()

    return build


@pytest.fixture
def tiny_reward_model() -> Callable[..., Any]:
    def build(seed: int = 1) -> LlamaForSequenceClassification:
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(
            LlamaConfig(**TINY, num_labels=1, initializer_range=0.2)
        ).eval()
        model.config.mean, model.config.std = 0.0, 1.0
        return model

    return build
