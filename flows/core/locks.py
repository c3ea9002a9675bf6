"""The entries of dvc.lock: for each stage its params, and its deps and outs with their md5."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.core.addresses import split_address
from stages.lib.core.ended_rounds import ended_names, has_ended, lock_path
from stages.lib.core.reading import read_yaml
from stages.lib.core.validation import check_type

LOCK = Path("dvc.lock")


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


def read_locks() -> dict[str, dict[str, Any]]:
    """The entries by address, also those of ended rounds."""
    paths = [LOCK, *map(lock_path, ended_names())]
    return {address: entry for path in paths for address, entry in _read(path).items()}


def read_lock(address: str) -> dict[str, Any]:
    """The entry of a stage; empty if there is none."""
    round_ = split_address(address)[1]
    return _read(lock_path(round_) if has_ended(round_) else LOCK).get(address, {})


def digests(round_: str) -> dict[str, str]:
    """md5 of the models of a round (base, SFT, reward, policy) by path."""
    entries = _read(LOCK) | (_read(lock_path(round_)) if has_ended(round_) else {})
    stages = ("sft", "reward", "ppo")
    return {
        out["path"]: out["md5"]
        for address in ("assets", *(f"{stage}@{round_}" for stage in stages))
        for out in entries.get(address, {}).get("outs", [])
    }


def digest_of(path: str, known: Mapping[str, str]) -> str:
    """A model's md5; if DVC tracks only its parent folder, that folder's; else empty."""
    return known.get(path) or known.get(str(Path(path).parent), "")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    fix = f"restore it, e.g. with `git checkout {path}`"
    if path == LOCK:
        fix += ", or delete it: `rondo run` makes it again, from DVC's cache"
    values = read_yaml(path, fix)
    check_type(LockFile, values, str(path), fix)
    return dict(values["stages"])
