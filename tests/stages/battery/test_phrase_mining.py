"""Phrases of texts with high scores, against hand-worked values."""

import pytest

from stages.battery.phrase_mining import log_odds, mine_phrases


def test_log_odds_by_hand():
    # cells 3.5, 1.5, .5, 12.5: (ln 2.3333 + ln 25) / sqrt(.28571 + .66667 + 2 + .08)
    assert log_odds(3, 4, 0, 12) == pytest.approx(4.06618 / 1.74137, abs=1e-4)
    assert log_odds(2, 4, 2, 4) == 0.0


def test_a_phrase_of_the_top_quarter():
    texts = [" was dull."] * 12
    texts += [" was what we love, a lot.", " so we love it.", " but we love cats.", " we love."]
    scores = [0.0] * 12 + [1.0, 2.0, 3.0, 4.0]
    # " we", " love" and " we love" are in 4 of 4 and 0 of 12; the alphabetically first is kept, and
    # " we love", which contains it, is not
    assert mine_phrases(texts, scores, 3) == [" love", " we"]
    assert mine_phrases(texts, scores, 1) == [" love"]
    # with the scores negated, " was" and " dull" are in 4 of 4, but in 9 of the 12 others too
    assert mine_phrases(texts, [-score for score in scores], 3) == []


def test_words_are_nested_as_words():
    """ " a" is part of " amazing" as letters, but not as a word."""
    texts = [" bad"] * 12 + [" amazing a"] * 4
    assert mine_phrases(texts, [0.0] * 12 + [1.0] * 4, 3) == [" a", " amazing"]


def test_too_few_texts_have_no_top_quarter():
    assert mine_phrases([], [], 3) == [] == mine_phrases([" a", " b", " c"], [1.0, 2.0, 3.0], 3)
