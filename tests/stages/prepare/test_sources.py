"""Memory that files need, overlap of prompts, and replayed rows beside small training sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.lib.core import ram
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.data import PrepareParams, SourceParams
from stages.lib.core.types import Row
from stages.lib.data.splits import DataSets
from stages.prepare.__main__ import main, merge_replay
from stages.prepare.files import FIXED_BYTES, PEAK_PER_BYTE, check_memory, size_to_read
from stages.prepare.sources import check_no_prompt_overlap

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


def test_overlap_names_both_rows() -> None:
    held_out = [
        {"where": "e.jsonl:1", "prompt": "The sea"},
        {"where": "e.jsonl:2", "prompt": "The sky is"},
    ]
    check_no_prompt_overlap(held_out, [{"where": "t.jsonl:1", "prompt": "The seal"}])
    with pytest.raises(
        BadInput, match=r"(?s)1 training rows.*held-out e\.jsonl:2 and training t\.jsonl:4"
    ):
        check_no_prompt_overlap(held_out, [{"where": "t.jsonl:4", "prompt": "the sky is blue"}])


def replay(folder: Path, rows: dict[str, list[Row]]) -> None:
    for name in ("sft", "pairs", "prompts"):
        write_jsonl(folder / f"replay/data/{name}.jsonl", rows.get(name, []))


COUNT = " One two three four five six seven eight nine ten eleven twelve thirteen."
HELD_OUT: DataSets = {
    "prompts": [{"id": "e-7", "prompt": "The sky"}],
    "sft": [{"id": "e-8", "prompt": "Tell me a tale.", "completion": COUNT}],
    "pairs": [],
}


TRAIN: DataSets = {
    name: [{"id": f"own-{i}", "prompt": f"p{i}"} for i in range(9)]
    for name in ("sft", "pairs", "prompts")
}


def test_replay_is_capped_at_a_share_of_the_merged_file(tmp_path: Path) -> None:
    """9 rows and a share of 1/4: 3 of 12."""
    prompts = [
        {"id": f"b{i}", "prompt": f"q{i}", "badcase": f"r0-{i}", "source": "replay"}
        for i in range(8)
    ]
    pairs = [row | {"chosen": " a", "rejected": " b"} for row in prompts]
    replay(tmp_path, {"pairs": pairs, "prompts": prompts[:2]})
    for share, added in ((0.25, 3), (0.0, 0), (1.0, 8)):
        assert merge_replay(TRAIN, HELD_OUT, tmp_path, share, 0.9) == {
            "sft": [],
            "pairs": pairs[:added],
            "prompts": prompts[: min(added, 2)],
        }


def test_replayed_prompts_have_the_columns_of_the_data(tmp_path: Path) -> None:
    """Of the same prompt, ignoring case and white space; a prompt from a report has none."""
    replayed = [{"id": "b1", "prompt": "P3 "}, {"id": "b2", "prompt": "reported"}]
    replay(tmp_path, {"prompts": replayed})
    own = [{"id": f"own-{i}", "prompt": f"p{i}", "columns": {"answer": i}} for i in range(9)]
    train: DataSets = {**TRAIN, "prompts": own}
    assert merge_replay(train, HELD_OUT, tmp_path, 1.0, 0.9)["prompts"] == [
        {**replayed[0], "columns": {"answer": 3}},
        replayed[1],
    ]


def test_the_first_round_has_no_replay(tmp_path: Path) -> None:
    (tmp_path / "replay/data").mkdir(parents=True)
    (tmp_path / "replay/data/EMPTY").touch()
    added = merge_replay(TRAIN, HELD_OUT, tmp_path, 0.25, 0.9)
    assert added.keys() == TRAIN.keys() and not any(added.values())


def test_an_evaluation_prompt_in_the_replay_is_refused_even_beyond_the_cap(tmp_path: Path) -> None:
    rows = [{"id": f"b{i}", "prompt": f"q{i}"} for i in range(8)] + [
        {"id": "b8", "prompt": " The SKY"}
    ]
    replay(tmp_path, {"prompts": rows})
    message = r"prompts\.jsonl:9: its prompt is evaluation prompt e-7, .*`rondo run --rerun all`"
    with pytest.raises(BadInput, match=message):
        merge_replay(TRAIN, HELD_OUT, tmp_path, 0.25, 0.9)


def test_a_replayed_row_with_a_held_out_text_is_refused(tmp_path: Path) -> None:
    leaking = " Well: one two three four five six seven eight nine ten eleven twelve thirteen!"
    rows = [
        {"id": "b0", "prompt": "Count", "completion": " on"},
        {"id": "b1", "prompt": "Count", "completion": leaking},
    ]
    replay(tmp_path / "rounds/r0", {"sft": rows})
    message = r"sft\.jsonl:2 and held-out e-8: “one two .*thirteen”.*`dvc repro replay@r0`"
    with pytest.raises(BadInput, match=rf"(?s)1 training rows.*{message}"):
        merge_replay(TRAIN, HELD_OUT, tmp_path / "rounds/r0", 0.25, 0.9)
