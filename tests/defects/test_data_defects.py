"""One defect each in the users' own files: prepare stops and names the rows, or leaves them out and
reports them.
"""

from collections.abc import Callable
from typing import Any

import pytest

from stages.lib.core.files import ASSETS, REPORTS, read_json, read_jsonl, stage_dir, write_jsonl
from tests.defects.world import Rows, World, world

DATA = stage_dir("r0", "prepare") / "data"


def with_rows(name: str, rows: Rows) -> World:
    """That source with these rows at its beginning."""
    return {name: rows + world()[name]}


def test_an_evaluation_prompt_that_is_trained_on(planted):
    row = {
        **world()["eval_pairs.jsonl"][6],
        "chosen": " was quite something.",
        "rejected": " was nothing at all.",
    }
    stop = planted("assets", with_rows("train_pairs.jsonl", [row]))
    assert (
        stop.step == "prepare"
        and "training train_pairs.jsonl:1" in stop.message
        and "held-out eval_" in stop.message
    )


def test_an_evaluation_text_within_a_training_text(planted):
    """Thirteen words in a row, under another prompt."""
    words = "one fine day in May we all went out to sea with Anna and Tom"
    held_out = {"prompt": "Our walk", "completion": f" {words}, and laughed."}
    training = {"prompt": "The letter", "completion": f" says: {words}. So it was."}
    stop = planted(
        "assets",
        with_rows("train_texts.jsonl", [training]) | with_rows("eval_texts.jsonl", [held_out]),
    )
    assert stop.step == "prepare"
    assert (
        "training train_texts.jsonl:1 and held-out eval_texts.jsonl:1" in stop.message
        and "one fine day in may we all" in stop.message
    )


def test_a_replayed_row_of_an_evaluation_prompt(planted):
    """What an earlier round would hand on."""
    replay = ASSETS / "start/replay/data"
    (replay / "EMPTY").unlink()
    prompt = read_jsonl(DATA / "eval_prompts.jsonl", "")[0]["prompt"]
    for name in ("sft", "pairs", "prompts"):
        rows = (
            [{"id": "replay-1", "prompt": prompt, "source": "replay", "badcase": "1"}]
            if name == "prompts"
            else []
        )
        write_jsonl(replay / f"{name}.jsonl", rows)
    stop = planted("prepare")
    assert (
        stop.step == "prepare"
        and "assets/start/replay/data/prompts.jsonl:1" in stop.message
        and "evaluation prompt" in stop.message
    )


PAIR = world()["train_pairs.jsonl"][0]
BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "empty": (lambda row: {**row, "rejected": " "}, "`rejected` is empty"),
    "role marker": (
        lambda row: {**row, "chosen": row["chosen"] + "\n\nHuman: and then?"},
        "Human:",
    ),
    "no prompt": (
        lambda row: {"chosen": [answer(row["chosen"])], "rejected": [answer(row["rejected"])]},
        "no prompt",
    ),
    "turn order": (
        lambda row: {
            "prompt": [user(row["prompt"]), user("Well?")],
            "chosen": [answer(row["chosen"])],
            "rejected": [answer("no")],
        },
        "turn 2",
    ),
    "prompts that differ": (
        lambda row: {
            "chosen": [user("One?"), answer("yes")],
            "rejected": [user("Two?"), answer("no")],
        },
        "differ before the last assistant turn",
    ),
    "margin": (lambda row: {**row, "margin": "much"}, "margin"),
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("defect", BAD)
def test_rows_that_cannot_be_used(planted, defect):
    change, message = BAD[defect]
    rows = [change(row) for row in world()["train_pairs.jsonl"][:80]]
    stop = planted("assets", with_rows("train_pairs.jsonl", rows))
    assert stop.step == "prepare" and "rows are bad" in stop.message
    assert (
        "train_pairs.jsonl:1:" in stop.message
        and message in stop.message
        and "rondo check-data" in stop.message
    )


def test_rows_that_say_nothing_are_left_out_and_reported(planted):
    """A few of them stop nothing."""
    [(cause, before)] = read_json(REPORTS / "r0/data.json", "")["by_cause"].items()
    assert cause == "exact duplicate"  # the world says some things twice
    rows = world()["train_pairs.jsonl"]
    added = {
        "contradiction": {**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]},
        "tie": {**rows[1], "chosen": " was so so.", "rejected": " was  so so."},
        "exact duplicate": {**rows[2], "chosen": rows[2]["chosen"].upper()},
    }
    assert planted("assets", {"train_pairs.jsonl": [*rows, *added.values()]}) is None
    report, page = read_json(REPORTS / "r0/data.json", ""), (REPORTS / "r0/data.html").read_text()
    assert report["by_cause"] == {
        "contradiction": 2,
        "tie": 1,
        "exact duplicate": before + 1,
    }  # of a contradiction both, for who is right?
    for number, cause in enumerate(added, len(rows) + 1):
        assert f"train_pairs.jsonl:{number}" in {row["where"] for row in report["dropped"][cause]}
        assert cause in page and (
            cause == "exact duplicate" or f"train_pairs.jsonl:{number}" in page
        )  # the page shows the first five
