"""A person's word on a gate that asks: approvals/<round>/<gate>.json, kept in git.

It holds for the numbers that the person saw; when one of them has changed, the gate asks again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from stages.errors import BadInput, faults
from stages.records import write_json

APPROVALS = Path("approvals")
ROUNDING = 1e-6  # relative: a number that was written and read again


class Approval(BaseModel, extra="forbid"):
    """failed: the metrics that were out of their bands, with their values (null: missing or not finite)."""

    approved: bool
    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    failed: dict[str, float | None]

    def holds_for(self, failed: Mapping[str, float | None]) -> bool:
        """Whether these are the numbers that were seen."""
        return failed.keys() == self.failed.keys() and all(_same(value, self.failed[name]) for name, value in failed.items())


def _same(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else abs(a - b) <= ROUNDING * max(abs(a), abs(b))


def approval_path(round_: str, gate: str) -> Path:
    return APPROVALS / round_ / f"{gate}.json"


def read_approval(round_: str, gate: str) -> Approval | None:
    """
    Raises:
        BadInput: the file is there and is no approval.
    """
    path = approval_path(round_, gate)
    if not path.exists():
        return None
    try:
        return Approval.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        fault = faults(error)
    except ValueError as error:
        fault = f"no JSON: {error}"
    raise BadInput(f"{path}: no approval ({fault}); remove it, and say it again with `rondo approve {gate} {round_}`")


def write_approval(round_: str, gate: str, approval: Approval) -> Path:
    path = approval_path(round_, gate)
    write_json(path, approval.model_dump())
    return path
