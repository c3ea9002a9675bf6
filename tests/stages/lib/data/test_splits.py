"""Held-out groups, prompts that begin others, and the frozen evaluation set."""

import json
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.data.splits import (
    PromptIndex,
    calibration_demonstrations,
    check_eval_set_unchanged,
    check_not_in_eval_set,
    check_prompts_not_in_eval_set,
    dedupe_prompts,
    evaluation_hash,
    hold_out,
    shuffled,
)


def test_hold_out_is_a_share_of_the_distinct_groups() -> None:
    groups = [*"abcdefghij", *"aaaa"]
    assert len(hold_out(groups, 0.3, seed=0)) == 3
    assert len(hold_out(["a"], 0.2, seed=0)) == 1
    assert len(hold_out(groups, 0.01, seed=0)) == 1  # at least one
    # shares are rounded to the nearest number: 0.29 * 10 is 2.9, and 29 / 100 * 100 is below 29
    assert len(hold_out(groups, 0.29, seed=0)) == 3
    assert len(hold_out(map(str, range(100)), 29 / 100, seed=0)) == 29
    assert hold_out(groups, 0.3, seed=0) == hold_out(reversed(groups), 0.3, seed=0)
    assert len({frozenset(hold_out(groups, 0.3, seed)) for seed in range(9)}) > 1


def test_a_prompt_begins_another_only_at_a_words_end() -> None:
    train = PromptIndex(
        [
            "The sky is blue",
            "Stop-gap",
            "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:",
            "Stop it",
        ]
    )
    assert train.has_start("the  sky IS blue")
    assert train.has_start("The sky is")
    assert train.has_start("stop")
    assert not train.has_start("The sky i")
    assert not train.has_start("The sky is blue today")
    assert train.has_start([{"role": "user", "content": "Hi"}])
    assert not train.has_start([{"role": "user", "content": "H"}])


def test_a_changed_evaluation_set_is_refused(tmp_path: Path) -> None:
    for round_ in ("r0", "r1"):
        for name in ("eval_prompts", "sft_eval", "pairs_eval"):
            write_jsonl(tmp_path / round_ / f"prepare/data/{name}.jsonl", [{"id": name}])
    folder = tmp_path / "r1/prepare/data"
    check_eval_set_unchanged(folder, tmp_path / "r0")
    (folder / "sft_eval.jsonl").write_text(json.dumps({"id": "another"}) + "\n")
    message = (
        r"sft_eval\.jsonl differs from .*frozen.* the first round\. Undo the change of seed, "
        r"assets or prepare\.\*, or start again with `dvc repro prepare@r0`"
    )
    with pytest.raises(BadInput, match=message):
        check_eval_set_unchanged(folder, tmp_path / "r0")
    (tmp_path / "r0/prepare/data/eval_prompts.jsonl").unlink()
    with pytest.raises(BadInput, match="dvc repro prepare@r0"):
        check_eval_set_unchanged(folder, tmp_path / "r0")


EVALUATION = [{"id": "e.jsonl:1", "prompt": "The sky"}, {"id": "e.jsonl:2", "prompt": "The sea"}]


def test_no_prompt_of_the_evaluation_set_is_trained_on() -> None:
    check_not_in_eval_set([("report 1", "The sky is"), ("report 2", "A sea")], EVALUATION, "wait")
    message = r"^report 2 is evaluation prompt e\.jsonl:2, which no round may train on; wait$"
    with pytest.raises(BadInput, match=message):
        check_not_in_eval_set([("report 1", "A"), ("report 2", "the  SEA")], EVALUATION, "wait")
    rows = [{"id": "t.jsonl:1", "prompt": "A"}, {"id": "t.jsonl:2", "prompt": "The sky"}]
    check_prompts_not_in_eval_set(rows[:1], EVALUATION)
    message = (
        r"^training prompt t\.jsonl:2 is evaluation prompt e\.jsonl:1, which no round may train "
        r"on; run `dvc repro prepare` again$"
    )
    with pytest.raises(BadInput, match=message):
        check_prompts_not_in_eval_set(rows, EVALUATION)


def test_the_hash_is_that_of_all_held_out_files(tmp_path: Path) -> None:
    for name, text in {"eval_prompts": "a", "sft_eval": "b", "pairs_eval": "c"}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    # printf abc | sha256sum
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert evaluation_hash(tmp_path) == expected


def test_a_prompt_is_kept_once() -> None:
    prompts = ["The sky", "A sea", "the  SKY", "A hill"]
    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(prompts)]
    # the last occurrences, from the end: hill, sky, sea; of each the first row
    assert [row["id"] for row in dedupe_prompts(rows)] == ["3", "0", "1"]


def test_rows_are_drawn_by_their_seed() -> None:
    rows = [{"id": str(number), "prompt": "A"} for number in range(300)]
    mixed = shuffled(rows, 1)
    assert mixed != rows and sorted(map(str, mixed)) == sorted(map(str, rows))
    assert mixed == shuffled(rows, 1) != shuffled(rows, 2)


def test_reward_models_are_calibrated_on_held_out_demonstrations(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(number), "prompt": "A", "completion": " b"} for number in range(300)]
    path = Path("rounds/r0/prepare/data/sft_eval.jsonl")
    for held_out in (rows, rows[:20], []):
        write_jsonl(path, held_out)
        drawn = calibration_demonstrations("r0", 1)
        assert len(drawn) == min(len(held_out), 256) and all(row in held_out for row in drawn)
        assert drawn == shuffled(held_out, 1)[:256]
