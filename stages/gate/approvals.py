"""Decisions of people, kept in git.

An approval of a failed gate whose policy is `ask` (approvals/<round>/<gate>.json) is valid for the
numbers that the person saw: if one of them changes, the gate asks again. The choice of another
champion after a round (approvals/<round>/taken_back.json) is valid for the policy of that round.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field

from stages.lib.core.champion import ChampionRecord
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_object, remove_unfinished, write_json
from stages.lib.core.validation import check_type

APPROVALS = Path("approvals")
RELATIVE_TOLERANCE = 1e-6  # a number may be rounded when it is written and read again


class Approval(BaseModel, extra="forbid"):
    """A decision on a failed gate.

    failed: the values of the metrics that failed (null: missing or not finite).
    """

    approved: bool
    by: str = Field(pattern=r"\S")
    reason: str = Field(pattern=r"\S")
    failed: dict[str, float | None]

    def holds_for(self, failed: Mapping[str, float | None]) -> bool:
        """Whether the failed metrics are those that the person saw."""
        return failed.keys() == self.failed.keys() and all(
            _same(value, self.failed[name]) for name, value in failed.items()
        )


class Rollback(BaseModel, extra="forbid"):
    """The decision of a person which policy is champion after a round, in place of its gate.

    policy: sha256 of the files (`stages.lib.core.files.file_hash`) of the round's own policy.
    champion: the one that the person chose.
    """

    by: str = Field(pattern=r"\S")
    reason: str = Field(pattern=r"\S")
    policy: str = Field(pattern="^[0-9a-f]{64}$")
    champion: ChampionRecord


Decision = TypeVar("Decision", Approval, Rollback)


def _same(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE)


def rollback_path(round_: str) -> Path:
    return APPROVALS / round_ / "taken_back.json"


def approval_path(round_: str, gate: str) -> Path:
    return APPROVALS / round_ / f"{gate}.json"


def check_reason(reason: str, example: str) -> None:
    """
    Raises:
        BadInput: the reason of a decision is empty.
    """
    if not reason.strip():
        raise BadInput(f'--reason is empty: give one, e.g. --reason "{example}"')


def read_approval(round_: str, gate: str) -> Approval | None:
    """The decision on a gate; None if there is none.

    Raises:
        BadInput: the file is not a valid approval.
    """
    return _read(approval_path(round_, gate), Approval, f"rondo approve {gate} {round_}")


def read_rollback(round_: str) -> Rollback | None:
    """The choice of the champion after a round; None if there is none.

    Raises:
        BadInput: the file does not name the person, the reason and the policy.
    """
    return _read(rollback_path(round_), Rollback, "rondo promote --rollback")


def _read(path: Path, kind: type[Decision], command: str) -> Decision | None:
    if not path.exists():
        return None
    fix = f"delete the file and decide again: `{command}`"
    where = f"{path}: not a valid {kind.__name__.lower()}"
    return check_type(kind, read_object(path, fix), where, fix)


def write_approval(round_: str, gate: str, approval: Approval) -> Path:
    path = approval_path(round_, gate)
    remove_unfinished(path)  # the gate depends on the folder
    write_json(path, approval.model_dump())
    return path
