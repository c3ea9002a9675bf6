"""One defect each in the demonstrations or in how SFT learns them: the pipeline stops at its gate,
and names it.
"""

from collections.abc import Callable

import pytest

from tests.defects.world import World, world


def demonstrations(change: Callable[[str], str], *, held_out: bool = False) -> World:
    """The training texts (and the held-out ones) with each completion changed."""
    names = ("train_texts.jsonl", "eval_texts.jsonl") if held_out else ("train_texts.jsonl",)
    return {
        name: [{**row, "completion": change(row["completion"])} for row in world()[name]]
        for name in names
    }


def test_nothing_learnt(planted):
    stop = planted("sft", sft={"learning_rate": 1e-6})
    assert stop.step == "gate_sft" and "sft.loss_before - sft.loss_after" in stop.failed
    assert "it learnt too little" in stop.message


def test_demonstrations_of_what_the_judge_dislikes(planted):
    words = {
        "wonderful": "awful",
        "great": "sad",
        "lovely": "dull",
        "happy": "terrible",
        "nice": "awful",
        "never once ": "",
    }

    def spoilt(text: str) -> str:
        for good, bad in words.items():
            text = text.replace(good, bad)
        return text

    stop = planted("assets", demonstrations(spoilt, held_out=True))
    assert stop.step == "gate_sft" and stop.failed == ("sft.net_win_rate_low",)
    assert "may be worse than those of the base model" in stop.message


def test_demonstrations_that_are_too_long(planted):
    """sft.max_length leaves no room for any training text; held-out ones are short."""
    stop = planted("assets", demonstrations(lambda text: text * 8), sft={"max_length": 48})
    assert stop.step == "sft" and "rows are longer than sft.max_length (48" in stop.message
    assert "sft.overlong" in stop.message


def test_demonstrations_without_an_end(planted):
    """All are cut at the length of the longest, and the model learns to write on until there."""
    stop = planted("assets", demonstrations(lambda text: text * 8), sft={"overlong": "close"})
    assert stop.step == "gate_sft" and "sft.eos_rate_demonstrations - sft.eos_rate" in stop.failed
    assert "responses do not end" in stop.message and "sft.max_length" in stop.message


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda text: text.split()[0], "far shorter"), (lambda text: text + text, "far longer")],
)
def test_training_texts_of_another_length(planted, change, message):
    stop = planted("assets", demonstrations(change), ppo={"response_length": 32})
    assert stop.step == "gate_sft" and "sft.length_ratio" in stop.failed
    assert message in stop.message


def test_training_texts_that_repeat_themselves(planted):
    stop = planted("assets", demonstrations(lambda text: " so so so so so so."))
    assert (
        stop.step == "gate_sft"
        and "sft.repetition_3 - sft.repetition_3_demonstrations" in stop.failed
    )
    assert "it repeats phrases" in stop.message


def test_a_few_training_texts_learnt_by_heart(planted):
    """Six long ones, which no held-out text has a part of."""
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
    ]
    texts = [" " + " ".join(words[start:] + words[:start]) + "." for start in range(6)]
    rows = [
        {**row, "completion": texts[number % 6]}
        for number, row in enumerate(world()["train_texts.jsonl"])
    ]
    stop = planted("assets", {"train_texts.jsonl": rows}, ppo={"response_length": 32})
    assert stop.step == "gate_sft" and "sft.memorised - sft.memorised_demonstrations" in stop.failed
    assert "it recites training texts" in stop.message
