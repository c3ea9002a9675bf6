"""Lineage: which run made each stage of a round, and under which md5 DVC keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.core.prefect_api import PREFECT_URL
from flows.report import summary
from flows.tracking import provenance

KEPT = ("/data", "/model", "/policy")


@dataclass(frozen=True)
class Origin:
    """made: None where it was not made here. kept: md5 of what DVC has of it, models and data, by
    path.
    """

    address: str
    made: provenance.StageProvenance | None
    kept: Mapping[str, str]

    @property
    def prefect(self) -> str | None:
        """The page of its flow run."""
        return (
            f"{PREFECT_URL}/runs/flow-run/{self.made.flow_run}"
            if self.made and self.made.flow_run
            else None
        )


def origins(rounds: Sequence[str], locks: Mapping[str, Mapping[str, Any]]) -> list[Origin]:
    """Of all stages that dvc.lock knows: of `assets`, which the rounds share, then round by round."""
    addresses = ["assets", *(f"{stage}@{name}" for name in rounds for stage in summary.STAGES)]
    return [
        Origin(address, provenance.read(address, lock), kept(lock))
        for address in addresses
        if (lock := locks.get(address))
    ]


def kept(lock: Mapping[str, Any]) -> dict[str, str]:
    return {out["path"]: out["md5"] for out in lock.get("outs", []) if out["path"].endswith(KEPT)}
