"""Memory is estimated from the files, before they are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.lib.core import ram
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.prepare.__main__ import main
from stages.prepare.sources import FIXED_BYTES, PEAK_PER_BYTE, check_memory, size_to_read

ROWS = [{"prompt": f"p{i:03}", "chosen": "a" * 40, "rejected": "b" * 40} for i in range(100)]
LINE = len('{"prompt": "p000", "chosen": "", "rejected": ""}\n') + 80


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the memory of the container, in bytes."""

    def with_memory(size: float) -> None:
        limit = tmp_path / "memory.max"
        limit.write_text(f"{int(size)}\n")
        monkeypatch.setattr(ram, "CGROUP_LIMIT", limit)

    return with_memory


def write(path: Path) -> Path:
    lines = (
        f'{{"prompt": "{r["prompt"]}", "chosen": "{r["chosen"]}", "rejected": "{r["rejected"]}"}}\n'
        for r in ROWS
    )
    path.write_text("".join(lines))
    return path


def test_what_is_read_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl")
    assert size_to_read(path, None) == (100 * LINE, 100)
    assert size_to_read(path, 25) == (25 * LINE, 25)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "pairs.parquet")
    size, rows = size_to_read(tmp_path / "pairs.parquet", None)
    assert rows == 100 and size > 0
    assert size_to_read(tmp_path / "pairs.parquet", 50) == (size / 2, 50)


def test_rows_that_do_not_fit_are_refused_with_the_number_that_does(
    tmp_path: Path, machine: Any
) -> None:
    sources = [SourceParams(path=str(write(tmp_path / f"{name}.jsonl"))) for name in "ab"]
    needed = FIXED_BYTES + PEAK_PER_BYTE * 200 * LINE
    machine(needed + 1)
    check_memory(sources, PrepareParams())
    machine(FIXED_BYTES + PEAK_PER_BYTE * 80.5 * LINE)  # 80 rows: 40 of each file
    with pytest.raises(BadInput, match=r"about 200 rows .*max_rows to at most 40 rows"):
        check_memory(sources, PrepareParams())
    check_memory(sources, PrepareParams(max_rows=40))
    check_memory([SourceParams(path="org/name@0123456")], PrepareParams())  # size unknown


def test_the_stage_checks_it_before_it_reads(
    tiny_params: Callable[..., Params], machine: Any
) -> None:
    params = tiny_params({"mine.jsonl": ["not JSON"]})
    machine(1)
    with pytest.raises(BadInput, match=r"prepare\.sources: about 1 rows .*prepare\.max_rows"):
        main(params, "r0")
