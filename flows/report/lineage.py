"""Lineage: the run that made each stage of a round, and the md5s of its outputs in DVC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.core.locks import Locks
from flows.core.services import flow_run_page, prefect_pages
from flows.report import round_files
from flows.tracking import provenance
from flows.tracking.provenance import StageProvenance

LISTED_OUTPUTS = ("/data", "/model", "/policy")  # how their paths end


@dataclass(frozen=True)
class Origin:
    """provenance: None if the outputs were made in another folder. md5s: of the data and models in
    DVC, by path.
    """

    address: str
    provenance: StageProvenance | None
    md5s: Mapping[str, str]

    @property
    def prefect(self) -> str | None:
        """The address of the flow run's page."""
        flow_run = self.provenance.flow_run if self.provenance else None
        return flow_run_page(prefect_pages(), flow_run) if flow_run else None


def origins(rounds: Sequence[str], locks: Locks) -> list[Origin]:
    """Of all stages in `locks`: `assets`, which the rounds share, then round by round."""
    addresses = ["assets", *(f"{stage}@{name}" for name in rounds for stage in round_files.STAGES)]
    return [
        Origin(address, provenance.read(address, lock), listed_md5s(lock))
        for address in addresses
        if (lock := locks.get(address))
    ]


def listed_md5s(lock: Mapping[str, Any]) -> dict[str, str]:
    outs = lock.get("outs", [])
    return {out["path"]: out["md5"] for out in outs if out["path"].endswith(LISTED_OUTPUTS)}
