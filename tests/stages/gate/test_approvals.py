"""An approval is valid for the numbers that the person saw."""

import json

import pytest

from stages.gate.approvals import (
    Approval,
    approval_path,
    check_reason,
    read_approval,
    write_approval,
)
from stages.lib.core.errors import BadInput

SEEN = Approval(
    approved=True,
    by="Ada",
    reason="31 pairs, seen by hand",
    failed={"reward.ece": 0.123456789, "battery.scale": None},
)


@pytest.mark.parametrize(
    ("failed", "holds"),
    [
        (SEEN.failed, True),
        (SEEN.failed | {"reward.ece": 0.123456789 * (1 + 1e-9)}, True),
        (SEEN.failed | {"reward.ece": 0.1235}, False),
        (SEEN.failed | {"battery.scale": 4.0}, False),
        (SEEN.failed | {"reward.margin": 0.1}, False),
        ({"battery.scale": None}, False),
    ],
)
def test_valid_for_these_numbers_only(failed, holds):
    assert SEEN.holds_for(failed) is holds


def test_numbers_are_the_same_up_to_rounding_at_any_size():
    for seen in (1e-9, 0.5, 3e6):
        approval = SEEN.model_copy(update={"failed": {"a": seen}})
        same = [approval.holds_for({"a": seen * factor}) for factor in (1, 1 + 1e-7, 1 + 1e-5, -1)]
        assert same == [True, True, False, False]


def test_a_decision_needs_a_reason():
    check_reason("seen by hand", "why")
    with pytest.raises(BadInput, match=r'--reason is empty: give one, e\.g\. --reason "why"'):
        check_reason("  ", "why")


def test_written_and_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_approval("r0", "reward") is None
    write_approval("r0", "reward", SEEN)
    assert read_approval("r0", "reward") == SEEN


def test_what_a_killed_decision_left_does_not_stay(tmp_path, monkeypatch):
    """The gate depends on the folder."""
    monkeypatch.chdir(tmp_path)
    path = approval_path("r0", "reward")
    path.parent.mkdir(parents=True)
    path.with_name(f".{path.name}.{'0' * 32}.tmp").write_text("{")
    write_approval("r0", "reward", SEEN)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps(SEEN.model_dump() | {"reason": ""}),
        json.dumps(SEEN.model_dump() | {"by": None}),
    ],
)
def test_a_file_that_is_no_approval_is_an_error(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = approval_path("r0", "reward")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    message = r"approvals/r0/reward\.json: (not|expected a) .*rondo approve reward r0"
    with pytest.raises(BadInput, match=message):
        read_approval("r0", "reward")
