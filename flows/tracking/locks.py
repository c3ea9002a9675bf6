"""dvc.lock: the stages' params, and the md5 of their inputs and outputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_locks() -> dict[str, dict[str, Any]]:
    """The stages in dvc.lock by address: params, and deps and outs with their md5."""
    path = Path("dvc.lock")
    if not path.exists():
        return {}
    # libyaml's parser: each stage of each round is in this file, and each stage of a run reads it
    return dict(yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["stages"])


def read_lock(address: str) -> dict[str, Any]:
    """The stage's entry in dvc.lock; empty if there is none."""
    return read_locks().get(address, {})


def digests(round_: str) -> dict[str, str]:
    """md5 of the models of a round (base, SFT, reward, policy) by path, from dvc.lock."""
    locks, stages = read_locks(), ("sft", "reward", "ppo")
    return {
        out["path"]: out["md5"]
        for name in ("assets", *(f"{stage}@{round_}" for stage in stages))
        for out in locks.get(name, {}).get("outs", [])
    }


def digest_of(path: str, known: Mapping[str, str]) -> str:
    """A model's md5; if DVC tracks only its parent folder, that folder's; else empty."""
    return known.get(path) or known.get(str(Path(path).parent), "")
