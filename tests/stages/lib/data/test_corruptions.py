"""Corruptions by hand."""

import random

import pytest

from stages.lib.data.corruptions import (
    corruptions,
    repeated_word,
    truncated,
    word_salad,
    word_score_uplift,
)

CHAT = [{"role": "user", "content": "How are you?"}]


def test_word_salad_keeps_the_words_and_the_leading_space():
    text = " one two  three, four five six"
    mixed = word_salad(text, random.Random("0"))
    assert mixed != text and mixed.startswith(" ") and not mixed.startswith("  ")
    assert sorted(mixed.split()) == sorted(text.split())
    assert {word_salad(" a b", random.Random(seed)) for seed in range(9)} == {" b a"}


@pytest.mark.parametrize(
    ("text", "half"),
    [(" a b c d e", " a b"), ("a\n\nb, c d", "a\n\nb,"), (" one", ""), ("", "")],
)
def test_the_first_half_as_written(text, half):
    assert truncated(text) == half


def test_texts_without_spaces_are_corrupted_by_characters():
    text = " 我喜欢你。谢谢。"  # 我 喜 欢 你。 谢 谢。
    assert truncated(text) == " 我喜欢"
    mixed = word_salad(text, random.Random("0"))
    assert mixed != text and sorted(mixed) == sorted(text) and mixed.startswith(" ")
    assert repeated_word(text, {"谢": 1.0}) == " 谢谢谢谢谢谢"
    assert {word_salad("用 iPhone", random.Random(seed)) for seed in range(9)} == {"iPhone用"}


def test_uplift_is_shrunk_towards_the_mean():
    # the mean is 2; "great" is 3 and 1 above it, with one more text at 0: 4 / 3; "so": 3 / 2;
    # "bad": 2 below it, twice: -4 / 3
    worth = word_score_uplift(
        ["so great", "great great", "bad it", "bad day"], [5.0, 3.0, 0.0, 0.0]
    )
    assert (
        worth["great"] == pytest.approx(4 / 3)
        and worth["so"] == pytest.approx(3 / 2)
        and worth["bad"] == pytest.approx(-4 / 3)
    )


def test_the_most_valuable_word_is_repeated():
    worth = {"great": 2.0, "was": -0.5, "!": 9.0}
    assert repeated_word(" It was GREAT !", worth) == " great great great great"
    assert (
        repeated_word(" was b a", worth) == " a a a"
    )  # with equal worth the first of the alphabet
    assert repeated_word(" !!", worth) == " !!"


def test_every_text_is_corrupted_in_every_way():
    texts = [("It", " is fun today"), ("It", " is"), (CHAT, "Fine, thanks.")]
    corrupted = corruptions(texts, {"fun": 1.0}, seed=0)
    assert corrupted["empty"] == [("It", ""), ("It", ""), (CHAT, "")]
    assert corrupted["truncated"] == [("It", " is"), ("It", ""), (CHAT, "Fine,")]
    assert corrupted["repeated_word"] == [
        ("It", " fun fun fun"),
        ("It", " is"),
        (CHAT, "fine fine"),
    ]
    # the next prompt that differs; after the last one comes the first
    assert corrupted["prompt_swapped"] == [
        (CHAT, " is fun today"),
        (CHAT, " is"),
        ("It", "Fine, thanks."),
    ]
    assert corrupted["word_salad"] == corruptions(texts, {}, seed=0)["word_salad"]
    assert corruptions(texts[:2], {}, seed=0)["prompt_swapped"] == texts[:2]
