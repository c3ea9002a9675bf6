"""Edits that keep the meaning of a response, and flips on reward models that are formulas."""

import random

import pytest

from stages.battery.probes import EDITS, flip_metrics
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import Edit


@pytest.mark.parametrize(
    ("edit", "text", "expected"),
    [
        (Edit.lower_case, " It was Great", " it was great"),
        (Edit.quoted, " It was great ", ' "It was great" '),
        (Edit.quoted, "  ", "  "),
        (Edit.typo, " it was then so", " it was tehn so"),
        (Edit.typo, " it was gooood", " it was gooood"),  # no inner letters that differ
        (Edit.typo, " a b c", " a b c"),
        (Edit.typo, "1234 ab12", "1234 ab12"),
    ],
)
def test_edits_by_hand(edit, text, expected):
    assert EDITS[edit](text, random.Random(0)) == expected


def test_a_typo_swaps_two_inner_letters_of_any_word():
    text = " some words here"
    edited = {EDITS[Edit.typo](text, random.Random(seed)) for seed in range(50)}
    inner = [(2, 3), (7, 8), (8, 9), (13, 14)]  # om; or, rd; er
    expected = set()
    for a, b in inner:
        letters = list(text)
        letters[a], letters[b] = letters[b], letters[a]
        expected.add("".join(letters))
    assert edited == expected


def test_every_edit_of_the_params_exists():
    assert EDITS.keys() == set(Edit)


PAIRS = [
    {"prompt": "It", "chosen": " Was good", "rejected": " was bad"},
    {"prompt": "It", "chosen": " was good", "rejected": " was bad"},
    {"prompt": "It", "chosen": " Was bad", "rejected": " was good"},  # ranked wrongly
    {"prompt": "It", "chosen": " Good", "rejected": " BAD"},
]


def by_word(prompts, texts):
    assert len(prompts) == len(texts)
    return [2.0 * ("good" in text.lower()) for text in texts]


def by_capital(prompts, texts):
    """A capital letter at the start is worth three times the right word."""
    words = by_word(prompts, texts)
    return [word + 6.0 * text[1].isupper() for word, text in zip(words, texts, strict=True)]


def flips(score, pairs=PAIRS):
    params = Params()
    params.battery.edits = [Edit.lower_case]
    chosen, rejected = (
        score([row["prompt"] for row in pairs], [row[side] for row in pairs])
        for side in ("chosen", "rejected")
    )
    metrics = flip_metrics(pairs, chosen, rejected, score, params)
    assert metrics["worst_flip"] == metrics["flips"]["lower_case"]["rate"]
    return metrics["flips"]["lower_case"]


def test_a_reward_model_that_reads_words_keeps_its_order():
    """The third pair is ranked wrongly, and the second has nothing to change."""
    assert (flips(by_word)["rate"], flips(by_word)["pairs"]) == (0.0, 2)


def test_a_reward_model_that_reads_capitals_does_not():
    """It ranks the third pair correctly by its capital, and wrongly without."""
    result = flips(by_capital)
    assert (result["rate"], result["pairs"]) == (pytest.approx(1 / 3), 3)


def test_a_tie_after_the_edit_is_half_a_flip():
    only_capital = [{"prompt": "It", "chosen": " Good", "rejected": " good"}]
    assert flips(by_capital, only_capital)["rate"] == 0.5


def test_no_rate_without_a_text_that_changes():
    assert flips(by_word, PAIRS[1:2]) == {"rate": None, "low": None, "high": None, "pairs": 0}
