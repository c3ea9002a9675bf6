"""Rows read from files: required and optional keys."""

from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.core.rows import PreferencePair, read_rows

PAIR = {"id": "a", "prompt": "The sky", "chosen": " is blue", "rejected": " is red"}


def test_rows_are_read_with_optional_and_with_further_keys(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [PAIR, PAIR | {"margin": 2.0}, PAIR | {"by": "Ada"}]
    write_jsonl(path, rows)
    assert read_rows(PreferencePair, path, "make it") == rows


def test_a_row_without_a_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, [PAIR, {"id": "b", "prompt": "The sea", "chosen": " is wide"}])
    with pytest.raises(
        BadInput, match=r"pairs\.jsonl: row 2: rejected: Field required; run `make it`"
    ):
        read_rows(PreferencePair, path, "make it")


def test_a_number_as_text_is_none(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, [PAIR | {"margin": "2.0"}])
    with pytest.raises(BadInput, match=r"row 1: margin: Input should be a valid number"):
        read_rows(PreferencePair, path, "make it")
