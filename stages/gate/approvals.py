"""A person's word, kept in git: on a gate that asks (approvals/<round>/<gate>.json), or on a
champion (approvals/<round>/taken_back.json).

The first holds for the numbers that the person saw: when one of them has changed, the gate asks
again. The second holds for that policy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from stages.lib.core.errors import BadInput, format_validation_errors
from stages.lib.core.files import write_json

APPROVALS = Path("approvals")
ROUNDING = 1e-6  # relative: a number that was written and read again


class Approval(BaseModel, extra="forbid"):
    """failed: the metrics that were out of their bands, with their values (null: missing or not
    finite).
    """

    approved: bool
    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    failed: dict[str, float | None]

    def holds_for(self, failed: Mapping[str, float | None]) -> bool:
        """Whether these are the numbers that were seen."""
        return failed.keys() == self.failed.keys() and all(
            _same(value, self.failed[name]) for name, value in failed.items()
        )


class Rollback(BaseModel, extra="forbid"):
    """A champion that is none any more. policy: sha256 of its files (`stages.records.file_hash`)."""

    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    policy: str = Field(pattern="^[0-9a-f]{64}$")


Word = TypeVar("Word", Approval, Rollback)


def _same(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else abs(a - b) <= ROUNDING * max(abs(a), abs(b))


def taken_back_path(round_: str) -> Path:
    return APPROVALS / round_ / "taken_back.json"


def approval_path(round_: str, gate: str) -> Path:
    return APPROVALS / round_ / f"{gate}.json"


def read_approval(round_: str, gate: str) -> Approval | None:
    """
    Raises:
        BadInput: the file is there and is no approval.
    """
    return _read(
        approval_path(round_, gate), Approval, "no approval", f"rondo approve {gate} {round_}"
    )


def read_rollback(round_: str) -> Rollback | None:
    """
    Raises:
        BadInput: the file is there and does not say who, why and which policy.
    """
    return _read(taken_back_path(round_), Rollback, "no rollback", "rondo promote --rollback")


def _read(path: Path, kind: type[Word], otherwise: str, command: str) -> Word | None:
    if not path.exists():
        return None
    try:
        return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        fault = format_validation_errors(error)
    except ValueError as error:
        fault = f"no JSON: {error}"
    raise BadInput(f"{path}: {otherwise} ({fault}); remove it, and say it again with `{command}`")


def write_approval(round_: str, gate: str, approval: Approval) -> Path:
    path = approval_path(round_, gate)
    write_json(path, approval.model_dump())
    return path
