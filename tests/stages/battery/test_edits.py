"""Edits that keep the meaning of a response."""

import random

import pytest

from stages.battery.probes import EDITS
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
