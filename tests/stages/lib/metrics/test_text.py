"""Text statistics by hand."""

from collections import Counter

import pytest

from stages.lib.metrics.text import (
    distinct_n,
    phrases,
    repetition_n,
    strip_emoji_and_exclamations,
    suffix_counts,
    suffixes,
    tokens,
    words,
)


def test_tokens_are_words_runs_of_punctuation_and_whole_emoji_and_emoticons():
    assert tokens("Don't STOP!!! 👍🏽❤️👨‍👩‍👧") == ["don't", "stop", "!!!", "👍🏽", "❤️", "👨‍👩‍👧"]
    words = ["ha", ":d", ":-))", "<3", "at", "5", ":", "30", "to", ":", "dave"]
    assert tokens("Ha :D :-)) <3 at 5:30 to:Dave") == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iPhone手机。", ["iphone", "手", "机", "。"]),  # Chinese
        ("スキ。。", ["ス", "キ", "。。"]),  # Japanese
        ("ที่นี่", ["ที่", "นี่"]),  # Thai: vowel and tone stay with their letter
        ("나는 좋다", ["나는", "좋다"]),  # Korean has spaces
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),  # Hindi has spaces, and vowel signs
        ("cafe\u0301", ["cafe\u0301"]),
    ],
)
def test_in_scripts_without_spaces_each_character_is_a_word(text, expected):
    assert tokens(text) == expected


def test_words_are_as_written():
    assert [word[0] for word in words("Well,  don't\nstop (now)!")] == [
        *("Well,", "don't", "stop", "(now)!")
    ]
    assert [word[0] for word in words("用iPhone。好。ที่นี่")] == [
        *("用", "iPhone。", "好。", "ที่", "นี่")
    ]


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [
        ("a b a b a b", 3, 0.5),  # aba bab aba bab
        ("love love love love", 3, 0.5),  # the same 3-gram twice
        ("a b c d", 3, 0.0),
        ("a b", 3, 0.0),
        ("", 3, 0.0),
        ("我喜欢你" * 6, 3, 18 / 22),  # 24 characters: 22 3-grams, 4 of them distinct
        ("我喜欢你", 3, 0.0),
    ],
)
def test_repetition(text, n, share):
    assert repetition_n(text, n) == pytest.approx(share)


def test_distinct_is_counted_across_texts():
    # 2-grams: (a b) (b c) | (a b) (b d): three of four
    assert distinct_n(["a b c", "A b d"], 2) == 0.75
    assert distinct_n(["a"], 2) == 0.0
    # 我喜 喜欢 | 我喜 喜你: three of four
    assert distinct_n(["我喜欢", "我喜你"], 2) == 0.75


def test_distinct_is_the_share_among_200_drawn():
    # 200 words, each twice. A word is absent from a draw of 200 with (200 * 199) / (400 * 399)
    words = [f"w{number}" for number in range(200)]
    assert distinct_n([" ".join(words)] * 2, 1) == pytest.approx(1 - 39800 / 159600)
    assert distinct_n([" ".join(words)], 1) == 1.0
    # one word is in every draw, and a fifth of the other 500
    assert distinct_n(["a " * 500, " ".join(f"w{n}" for n in range(500))], 1) == pytest.approx(
        101 / 200
    )


def test_repetition_is_counted_within_50_words():
    words = [f"w{number}" for number in range(50)]
    assert repetition_n(" ".join(words * 2), 3) == 0.0
    assert repetition_n("x " * 10 + " ".join(words[:40]), 3) == pytest.approx(7 / 48)
    # the last window ends with the text: words 0 to 50 and 10 to 60
    assert repetition_n("x " * 10 + " ".join(words), 3) == pytest.approx(7 / 96)


def test_emoji_emoticons_and_exclamation_marks_are_removed():
    assert (
        strip_emoji_and_exclamations("Great! 😃 Enjoy ❤️!! :) at 5:30 =P") == "Great Enjoy at 5:30"
    )


def test_suffixes_keep_the_space_before_them():
    assert suffixes("So. Enjoy! 😃") == [" 😃", "! 😃", " Enjoy! 😃"]
    assert suffixes("Hi") == ["Hi"]
    assert suffixes("") == []


def test_phrases_are_as_written_and_can_follow_a_text():
    expected = {" So", " fun", "!", " 😃", " So fun", " fun!", "! 😃"}
    assert phrases("So fun! 😃", longest=2) == expected
    assert phrases("") == set()
    assert phrases("好吗。", longest=2) == {"好", "吗", "。", "好吗", "吗。"}


def test_suffix_counts_are_of_texts():
    assert suffix_counts(["a b", "c b", "d"], longest=2) == Counter(
        {" b": 2, "a b": 1, "c b": 1, "d": 1}
    )
