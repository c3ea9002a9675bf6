"""The file of principles, and which row gets which of them."""

from collections import Counter
from pathlib import Path

import pytest

from stages.lib.core.constitution import draw_principle, read_principles
from stages.lib.core.errors import BadInput


def test_one_principle_per_line(tmp_path: Path) -> None:
    path = tmp_path / "principles.txt"
    path.write_bytes("\ufeffBe kind.\r\n\n  Be brief; no \u201cflattery\u201d. \n".encode())
    assert read_principles(path) == ["Be kind.", "Be brief; no \u201cflattery\u201d."]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b" \n\n", "is empty"), (b"\xff\xfe", "not UTF-8")]
)
def test_a_file_without_principles_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "principles.txt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"annotate\.constitution: .*principles\.txt.*{reason}"):
        read_principles(path)


@pytest.mark.parametrize("name", ["none.txt", ".", "/dev/zero"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"annotate\.constitution: no file .*one principle per line"):
        read_principles(tmp_path / name)


def test_principles_are_drawn_evenly_by_seed_and_row() -> None:
    """Of 3000 rows each of three principles gets 1000, give or take 4 standard deviations (26)."""
    principles, ids = ["a", "b", "c"], [f"row-{number}" for number in range(3000)]
    drawn = [draw_principle(principles, 0, row_id) for row_id in ids]
    assert drawn == [draw_principle(principles, 0, row_id) for row_id in ids]
    assert drawn != [draw_principle(principles, 1, row_id) for row_id in ids]
    assert all(abs(count - 1000) < 104 for count in Counter(drawn).values())
    assert draw_principle([], 0, "row") is None
