"""Tables of comparisons, worked by hand."""

import pytest

from stages.annotate.ranking import all_pairs, best_and_worst, copeland
from stages.lib.judging.pairwise import Preference

A, B, TIE = Preference.a, Preference.b, Preference.tie


def test_each_against_each():
    assert all_pairs(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all_pairs(1) == []


@pytest.mark.parametrize(
    ("results", "scores", "pair"),
    [
        # 2 beats all, 0 beats 1 and 3, 3 beats 1
        ([A, B, A, B, B, A], [2.0, 0.0, 3.0, 1.0], (2, 1)),
        # nobody wins
        ([TIE] * 6, [1.5, 1.5, 1.5, 1.5], None),
        # 0 beats 1 alone: it leads it by a point, the others tie
        ([A, TIE, TIE, TIE, TIE, TIE], [2.0, 1.0, 1.5, 1.5], (0, 1)),
        # the best (0) and the worst (3) tied with each other; of those that have a winner 0 over 2
        # leads by 1.5 first
        ([A, A, TIE, A, A, A], [2.5, 2.0, 1.0, 0.5], (0, 2)),
        # 3 beats 0, which has as many points
        ([A, A, B, A, TIE, TIE], [2.0, 1.5, 0.5, 2.0], (0, 2)),
    ],
)
def test_four_responses(results, scores, pair):
    table = dict(zip(all_pairs(4), results, strict=True))
    assert copeland(4, table) == scores
    assert best_and_worst(scores, table) == pair


def test_a_circle_has_no_best():
    table = dict(zip(all_pairs(3), [A, B, A], strict=True))  # 0 over 1, 2 over 0, 1 over 2
    assert copeland(3, table) == [1.0, 1.0, 1.0]
    assert best_and_worst([1.0, 1.0, 1.0], table) is None
    assert best_and_worst([0.0], {}) is None
