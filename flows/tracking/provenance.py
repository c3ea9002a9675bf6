"""Which run made what a stage has left: `.rondo/work/<round>/<stage>/made.json`, beside its clock,
since ids and times are not DVC's.

A note is kept under what was made, by the md5s in dvc.lock: a stage that DVC restores finds the
note of the run that made it, and one that was made elsewhere finds none.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from prefect.runtime import flow_run
from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.execution.energy import Meter
from flows.tracking.records import read_lock
from stages.lib.core.files import read_json, work_dir, write_json


class RunRef(NamedTuple):
    """A run of the pipeline, and the commit that it started from."""

    run: str
    revision: str


class StageProvenance(BaseModel):
    """flow_run: Prefect's id. mlflow: where its page was. watt_hours: None where they cannot be
    read.
    """

    run: str
    revision: str
    flow_run: str | None
    mlflow: str | None
    ended: datetime
    seconds: float
    watt_hours: float | None


def record_provenance(address: str, by: RunRef, mlflow: str | None, meter: Meter) -> None:
    """A stage has run, and dvc.lock has what it made."""
    made = StageProvenance(
        **by._asdict(),
        flow_run=flow_run.id,
        mlflow=mlflow,
        ended=datetime.now(UTC),
        seconds=meter.seconds,
        watt_hours=meter.watt_hours(),
    )
    write_json(
        place(address), known(address) | {digest(read_lock(address)): made.model_dump(mode="json")}
    )


def read(address: str, lock: Mapping[str, Any]) -> StageProvenance | None:
    """The note of what `lock`, its entry in dvc.lock, says of a stage; None where that was made
    elsewhere, or not yet.
    """
    told = known(address).get(digest(lock))
    return StageProvenance.model_validate(told) if told else None


def place(address: str) -> Path:
    stage, round_ = split_address(address)
    return work_dir(round_, stage) / "made.json"


def known(address: str) -> dict[str, Any]:
    path = place(address)
    return dict(read_json(path, "rondo run")) if path.exists() else {}


def digest(lock: Mapping[str, Any]) -> str:
    outs = {out["path"]: out["md5"] for out in lock.get("outs", [])}
    return hashlib.sha256(json.dumps(outs, sort_keys=True).encode()).hexdigest()[:12]
