"""A team's stores: one clone runs, pushes and records; another one, which shares nothing with it
but git, the DVC remote and the servers, has the same results.
"""

import os
import subprocess
from pathlib import Path

import pytest
import requests

from stages.lib.core.files import file_hash
from tests.paths import ROOT
from tests.stores.conftest import BUCKET, Stores, query

MODELS = ("sft/model", "reward/model", "ppo/policy")


class Clone:
    """A clone of a repository, and the home of the person who works in it."""

    def __init__(self, source: Path, folder: Path, stores: Stores) -> None:
        self.folder, self.stores = folder, stores
        self.environment = stores.environment(folder.with_name(f"{folder.name}-home"))
        subprocess.run(["git", "clone", "-q", source, folder], check=True)

    def run(self, *command: str) -> str:
        process = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | {"PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        return process.stdout

    def python(self, *arguments: str) -> str:
        return self.run(self.stores.python, *arguments)

    def hashes(self) -> dict[str, str]:
        return {name: file_hash(self.folder / "rounds/r0" / name) for name in MODELS}


@pytest.fixture(scope="module")
def first(stores, tmp_path_factory) -> Clone:
    """The clone that has run a round, with the commands of docs/scale.md."""
    clone = Clone(ROOT, tmp_path_factory.mktemp("team") / "first", stores)
    clone.python("-m", "dvc", "remote", "add", "-d", "team", f"s3://{BUCKET}/dvc")
    clone.python("-m", "dvc", "remote", "modify", "team", "endpointurl", stores.s3)
    clone.python("-m", "flows.cli", "run", "--preset", "tiny", "--rounds", "1")
    clone.python("-m", "dvc", "push")
    clone.run("git", "add", "-A")
    clone.run("git", "commit", "-qm", "a round")
    return clone


@pytest.fixture(scope="module")
def second(first, stores) -> Clone:
    """A new clone of the first one, with what its DVC remote has."""
    clone = Clone(first.folder, first.folder.with_name("second"), stores)
    assert not (clone.folder / "rounds/r0/ppo/policy").exists()
    clone.python("-m", "dvc", "pull")
    return clone


def test_another_clone_has_the_same_models_and_nothing_to_do(first, second):
    assert second.hashes() == first.hashes()
    # `inputs` hashes files that only params.yaml names, and runs each time
    assert second.python("-m", "dvc", "status") == "inputs:\n\talways changed\n"
    output = second.python("-m", "flows.cli", "run", "--dry-run")
    assert "to do: nothing; all 14 stages are up to date" in output


def test_another_clone_goes_on_where_the_first_one_has_stopped(first, second):
    output = second.python("-m", "flows.cli", "next-round", "--dry-run")
    assert "would run: prepare@r1, sft@r1" in output


def test_mlflow_has_the_run_in_postgresql_and_its_files_in_s3(first, stores):
    database = f"{stores.postgres}/mlflow"
    names = query(database, "select name from runs")
    assert any("ppo@r0" in name for name in names)
    kls = query(database, "select count(*) from metrics where key = 'validation_kl'")
    assert int(kls[0]) > 0
    listing = requests.get(
        f"{stores.s3}/{BUCKET}", {"list-type": 2, "prefix": "mlflow/"}, timeout=30
    )
    assert "metrics.json" in listing.text or "samples" in listing.text
    assert not (first.folder / ".rondo/mlflow.db").exists()


def test_prefect_has_the_run_in_postgresql(first, stores):
    states = query(f"{stores.postgres}/prefect", "select state_type from flow_run")
    assert "COMPLETED" in states
    assert not (first.folder / ".rondo/prefect/prefect.db").exists()


def test_a_remote_that_does_not_answer_is_an_error_of_dvc(second):
    second.python("-m", "dvc", "remote", "add", "gone", f"s3://{BUCKET}/dvc")
    second.python("-m", "dvc", "remote", "modify", "gone", "endpointurl", "http://127.0.0.1:9")
    process = subprocess.run(
        [second.stores.python, "-m", "dvc", "push", "-r", "gone"],
        cwd=second.folder,
        env=os.environ | second.environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode != 0
