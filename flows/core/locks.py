"""The entries of dvc.lock: for each stage its params, and its deps and outs with their md5."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.core.verdicts import read_gate
from stages.lib.core.ended_rounds import ended_names
from stages.lib.core.reading import read_yaml
from stages.lib.core.validation import check_type

LOCK = Path("dvc.lock")
METRICS = "metrics.json"
Locks = Mapping[str, Mapping[str, Any]]  # entries by address


class File(BaseModel):
    path: str
    md5: str


class StageLock(BaseModel):
    deps: list[File] = []
    outs: list[File] = []
    params: dict[str, dict[str, Any]] = {}


class LockFile(BaseModel):
    """What is read of dvc.lock."""

    stages: dict[str, StageLock]


def read_lock_file() -> dict[str, Any]:
    """All that dvc.lock has; empty if there is none."""
    if not LOCK.exists():
        return {}
    fix = (
        f"restore it, e.g. with `git checkout {LOCK}`, or delete it: `rondo run` makes it again, "
        "from DVC's cache"
    )
    values = read_yaml(LOCK, fix)
    check_type(LockFile, values, str(LOCK), fix)
    return dict(values)


def read_locks() -> dict[str, dict[str, Any]]:
    """The entries by address."""
    return dict(read_lock_file().get("stages", {}))


def current_locks(unfinished: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The entries of the stages whose results this folder has, by address.

    dvc.lock also has stages whose files are those of an earlier run: the metrics.json of the stage
    is missing or another one, the stage read what another stage has made anew since or has failed
    to make, or a gate before it stopped the run. They and the stages that depend on them are left
    out. Ended rounds are history: all their entries count, but those of gates that failed.

    Args:
        unfinished: stages that a run had to run, and did not.
    """
    locks = read_locks()
    ended, md5s = ended_names(), outputs(locks)
    makers = {out["path"]: address for address in locks for out in locks[address].get("outs", [])}
    stale = {
        address
        for address, entry in locks.items()
        if _has_stopped(address)
        or (
            split_address(address)[1] not in ended
            and (address in unfinished or not has_read(entry, md5s) or not has_metrics(entry))
        )
    }
    while dependents := {
        address
        for address, entry in locks.items()
        if address not in stale
        and split_address(address)[1] not in ended
        and any(makers.get(dep["path"]) in stale for dep in entry.get("deps", []))
    }:
        stale |= dependents
    return {address: entry for address, entry in locks.items() if address not in stale}


def outputs(locks: Locks) -> dict[str, str]:
    """The md5 of each output of the stages, by path."""
    return {out["path"]: out["md5"] for lock in locks.values() for out in lock.get("outs", [])}


def has_read(lock: Mapping[str, Any], md5s: Mapping[str, str]) -> bool:
    """Whether a stage has run on these outputs of other stages."""
    return all(md5s.get(dep["path"], dep["md5"]) == dep["md5"] for dep in lock.get("deps", []))


def has_metrics(lock: Mapping[str, Any]) -> bool:
    """Whether the metrics.json of a stage, if it makes one, is the recorded one."""
    recorded = {Path(out["path"]): out["md5"] for out in lock.get("outs", [])}
    return all(
        path.exists() and hashlib.md5(path.read_bytes()).hexdigest() == md5
        for path, md5 in recorded.items()
        if path.name == METRICS
    )


def _has_stopped(address: str) -> bool:
    """Whether the stage is a gate whose last verdict ended the run."""
    stage, round_ = split_address(address)
    gate = stage.removeprefix("gate_")
    verdict = read_gate(round_, gate) if gate != stage else None
    return bool(verdict and not verdict["may_continue"])


def is_here(lock: Mapping[str, Any]) -> bool:
    """Whether all outputs of a stage are in this folder; git alone has only its metrics.json."""
    return all(Path(out["path"]).exists() for out in lock.get("outs", []))


def read_lock(address: str) -> dict[str, Any]:
    """The entry of a stage; empty if there is none."""
    return read_locks().get(address, {})


def digests(round_: str) -> dict[str, str]:
    """md5 of the models of a round (base, SFT, reward, policy) by path."""
    entries = read_locks()
    stages = ("sft", "reward", "ppo")
    return {
        out["path"]: out["md5"]
        for address in ("assets", *(f"{stage}@{round_}" for stage in stages))
        for out in entries.get(address, {}).get("outs", [])
    }


def digest_of(path: str, known: Mapping[str, str]) -> str:
    """A model's md5; if DVC tracks only its parent folder, that folder's; else empty."""
    return known.get(path) or known.get(str(Path(path).parent), "")
