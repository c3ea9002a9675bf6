"""Held-out groups, prompts that begin others, and the frozen evaluation set."""

import json
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.lib.data.splits import (
    PromptIndex,
    check_eval_set_unchanged,
    hold_out,
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
