"""Replayed rows on disk, added to small training sets."""

from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.core.types import Row
from stages.lib.data.splits import DataSets
from stages.prepare.merge_replay import merge_replay


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
