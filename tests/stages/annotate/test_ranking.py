"""The pair chosen from tables of comparisons, worked out by hand."""

import pytest

from stages.annotate.ranking import best_and_worst, scores_from_preferences
from stages.lib.judging.copeland import all_pairs
from stages.lib.judging.pairwise import Preference

A, B, TIE = Preference.a, Preference.b, Preference.tie


@pytest.mark.parametrize(
    ("results", "scores", "pair"),
    [
        # 2 beats all, 0 beats 1 and 3, 3 beats 1
        ([A, B, A, B, B, A], [2.0, 0.0, 3.0, 1.0], (2, 1)),
        # all tie
        ([TIE] * 6, [1.5, 1.5, 1.5, 1.5], None),
        # only 0 beats 1: it leads by one point; the others tie
        ([A, TIE, TIE, TIE, TIE, TIE], [2.0, 1.0, 1.5, 1.5], (0, 1)),
        # the best (0) and the worst (3) tied with each other; of the comparisons with a winner,
        # 0 over 2 is the first with a lead of 1.5
        ([A, A, TIE, A, A, A], [2.5, 2.0, 1.0, 0.5], (0, 2)),
        # 3 beats 0, which has as many points
        ([A, A, B, A, TIE, TIE], [2.0, 1.5, 0.5, 2.0], (0, 2)),
    ],
)
def test_four_responses(results, scores, pair):
    preferences = dict(zip(all_pairs(4), results, strict=True))
    assert scores_from_preferences(4, preferences) == scores
    assert best_and_worst(scores, preferences) == pair


def test_a_cycle_has_no_best():
    # 0 beats 1, 2 beats 0, 1 beats 2
    preferences = dict(zip(all_pairs(3), [A, B, A], strict=True))
    assert scores_from_preferences(3, preferences) == [1.0, 1.0, 1.0]
    assert best_and_worst([1.0, 1.0, 1.0], preferences) is None
    assert best_and_worst([0.0], {}) is None
