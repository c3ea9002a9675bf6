import json
from pathlib import Path

import pytest

from stages.errors import BadInput
from stages.prepare.split import Prompts, check_frozen, hold_out, merge_replay, refuse_overlap
from stages.records import Row, write_jsonl


def test_hold_out_is_a_share_of_the_distinct_groups() -> None:
    groups = [*"abcdefghij", *"aaaa"]
    assert len(hold_out(groups, 0.3, seed=0)) == 3
    assert len(hold_out(["a"], 0.2, seed=0)) == 1
    assert hold_out(groups, 0.3, seed=0) == hold_out(reversed(groups), 0.3, seed=0)
    assert len({frozenset(hold_out(groups, 0.3, seed)) for seed in range(9)}) > 1


def test_a_prompt_begins_another_only_at_a_words_end() -> None:
    train = Prompts(["The sky is blue", "Stop-gap", "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:", "Stop it"])
    assert train.has_start("the  sky IS blue")
    assert train.has_start("The sky is")
    assert train.has_start("stop")
    assert not train.has_start("The sky i")
    assert not train.has_start("The sky is blue today")
    assert train.has_start([{"role": "user", "content": "Hi"}])
    assert not train.has_start([{"role": "user", "content": "H"}])


def test_overlap_names_both_rows() -> None:
    held_out = [{"where": "e.jsonl:1", "prompt": "The sea"}, {"where": "e.jsonl:2", "prompt": "The sky is"}]
    refuse_overlap(held_out, [{"where": "t.jsonl:1", "prompt": "The seal"}])
    with pytest.raises(BadInput, match=r"(?s)1 training rows.*held-out e\.jsonl:2 and training t\.jsonl:4"):
        refuse_overlap(held_out, [{"where": "t.jsonl:4", "prompt": "the sky is blue"}])


def replay(folder: Path, rows: dict[str, list[Row]]) -> None:
    for name in ("sft", "pairs", "prompts"):
        write_jsonl(folder / f"replay/data/{name}.jsonl", rows.get(name, []))


def train_rows() -> dict[str, list[Row]]:
    return {name: [{"id": f"own-{i}", "prompt": f"p{i}"} for i in range(9)] for name in ("sft", "pairs", "prompts")}


def test_replay_is_capped_at_a_share_of_the_merged_file(tmp_path: Path) -> None:
    """9 own rows and a share of 1/4: 3 of 12."""
    bad = [{"id": f"b{i}", "prompt": f"q{i}", "badcase": f"r0-{i}", "source": "replay"} for i in range(8)]
    replay(tmp_path, {"pairs": bad, "prompts": bad[:2]})
    train = train_rows()
    assert merge_replay(train, [], tmp_path, 0.25) == {"sft": 0, "pairs": 3, "prompts": 2}
    assert train["pairs"] == [*train_rows()["pairs"], *bad[:3]]
    assert train["prompts"][-1]["badcase"] == "r0-1"
    assert merge_replay(train_rows(), [], tmp_path, 0.0) == {"sft": 0, "pairs": 0, "prompts": 0}
    assert merge_replay(train_rows(), [], tmp_path, 1.0) == {"sft": 0, "pairs": 8, "prompts": 2}


def test_the_first_round_has_no_replay(tmp_path: Path) -> None:
    (tmp_path / "replay/data").mkdir(parents=True)
    (tmp_path / "replay/data/EMPTY").touch()
    train = train_rows()
    assert sum(merge_replay(train, [], tmp_path, 0.25).values()) == 0 and train == train_rows()


def test_an_evaluation_prompt_in_the_replay_is_refused_even_beyond_the_cap(tmp_path: Path) -> None:
    rows = [{"id": f"b{i}", "prompt": f"q{i}"} for i in range(8)] + [{"id": "b8", "prompt": " The SKY"}]
    replay(tmp_path, {"prompts": rows})
    with pytest.raises(BadInput, match=r"prompts\.jsonl:9: its prompt is evaluation prompt e-7"):
        merge_replay(train_rows(), [{"id": "e-7", "prompt": "The sky"}], tmp_path, 0.25)


def test_a_changed_evaluation_set_is_refused(tmp_path: Path) -> None:
    for round_ in ("r0", "r1"):
        for name in ("eval_prompts", "sft_eval", "pairs_eval"):
            write_jsonl(tmp_path / round_ / f"prepare/data/{name}.jsonl", [{"id": name}])
    folder = tmp_path / "r1/prepare/data"
    check_frozen(folder, tmp_path / "r0")
    (folder / "sft_eval.jsonl").write_text(json.dumps({"id": "another"}) + "\n")
    with pytest.raises(BadInput, match=r"sft_eval\.jsonl differs from .*frozen"):
        check_frozen(folder, tmp_path / "r0")
    (tmp_path / "r0/prepare/data/eval_prompts.jsonl").unlink()
    with pytest.raises(BadInput, match="dvc repro prepare@r0"):
        check_frozen(folder, tmp_path / "r0")
