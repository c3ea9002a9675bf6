"""Provenance: which pipeline run produced the outputs of a stage, and from which commit.

It is stored in `.rondo/work/<round>/<stage>/made.json`, outside DVC, because ids and times differ
in each run. The key of an entry is a hash of the outputs' md5s in dvc.lock. So a stage that DVC
restored has the entry of the run that produced it, and outputs from another folder have none.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from prefect.runtime import flow_run
from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.core.locks import read_lock
from flows.execution.meter import Meter
from stages.lib.core.files import json_hash, read_json, work_dir, write_json, write_text
from stages.lib.core.params import Params, flatten
from stages.lib.core.validation import check_type

PROJECT = "project"  # tag of a run
MAIN_SETTINGS = (
    *("seed", "assets.model", "assets.data"),
    *("sft.learning_rate", "sft.num_train_epochs", "sft.max_steps"),
    *("reward.learning_rate", "reward.num_train_epochs", "reward.max_steps"),
    *("algorithm", "ppo.engine", "ppo.total_episodes", "ppo.learning_rate", "ppo.kl_coef"),
    *("ppo.target_kl_per_token", "ppo.lora.r"),
    *("gates.sft.policy", "gates.reward.policy", "gates.promote.policy"),
)


class RunRef(NamedTuple):
    """A pipeline run."""

    run: str  # its name
    revision: str  # the commit that it started from


class StageProvenance(BaseModel):
    """The run that produced a stage's outputs."""

    run: str
    revision: str
    flow_run: str | None  # the run's id in Prefect
    mlflow: str | None  # the URL of the stage's page
    ended: datetime
    seconds: float  # that the stage took


def project_id(home: Path) -> str:
    """The name of a project on a machine: random, and the same for all runs with one .rondo folder,
    which is `home`. A damaged one is replaced.
    """
    path = home / "project_id"
    if not path.exists() or not re.fullmatch(rb"[0-9a-f]{12}", path.read_bytes()):
        write_text(path, uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def run_tags(by: RunRef, params: Params, preset: str, isolated: bool, home: Path) -> dict[str, str]:
    """The tags of a pipeline run and of its stages in MLflow.

    Args:
        preset: as the user named it.
        isolated: whether the run has a git worktree of its own.
        home: the .rondo folder.
    """
    return {
        "revision": by.revision,
        "seed": str(params.seed),
        "preset": preset,
        PROJECT: project_id(home),
        "isolated": str(isolated),
    }


def main_settings(params: Params, preset: str) -> dict[str, str]:
    """The settings by which people tell runs apart, as parameters of the run in MLflow."""
    values = dict(flatten(params.model_dump(mode="json"), separator="."))
    return {"preset": preset, **{key: str(values[key]) for key in MAIN_SETTINGS}}


def record_provenance(address: str, by: RunRef, mlflow: str | None, meter: Meter) -> None:
    """Record that the run `by` produced the outputs of a stage; call it after dvc.lock is written.

    Args:
        mlflow: the URL of the stage's page in MLflow.
        meter: measured the time of the stage.
    """
    provenance = StageProvenance(
        **by._asdict(),
        flow_run=flow_run.id,
        mlflow=mlflow,
        ended=datetime.now(UTC),
        seconds=meter.seconds,
    )
    entry = {outputs_hash(read_lock(address)): provenance.model_dump(mode="json")}
    write_json(provenance_path(address), read_entries(address) | entry)


def read(address: str, lock: Mapping[str, Any]) -> StageProvenance | None:
    """The provenance of the outputs in `lock`, the stage's entry in dvc.lock.

    None if they were not produced in this folder, or do not exist yet.
    """
    entry = read_entries(address).get(outputs_hash(lock))
    path = provenance_path(address)
    return check_type(StageProvenance, entry, str(path), f"run `rm {path}`") if entry else None


def provenance_path(address: str) -> Path:
    """The file with a stage's provenance."""
    stage, round_ = split_address(address)
    return work_dir(round_, stage) / "made.json"


def read_entries(address: str) -> dict[str, Any]:
    """All entries of a stage, by the hash of its outputs."""
    path = provenance_path(address)
    return dict(read_json(path, f"rm {path}")) if path.exists() else {}


def outputs_hash(lock: Mapping[str, Any]) -> str:
    """A hash of the paths and md5s of the outputs in a stage's entry of dvc.lock."""
    outs = {out["path"]: out["md5"] for out in lock.get("outs", [])}
    return json_hash(outs)[:12]
