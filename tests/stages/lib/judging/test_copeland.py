"""Copeland scores, worked out by hand."""

import pytest

from stages.lib.judging.jury import all_pairs, best_and_worst, copeland_scores


def test_every_response_is_paired_with_every_other():
    assert all_pairs(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all_pairs(1) == []


@pytest.mark.parametrize(
    ("votes", "scores"),
    [
        # 2 beats all others, 0 beats 1 and 3, 3 beats 1
        ([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 3.0, 1.0]),
        # all tie: half a point for each of three
        ([0.5] * 6, [1.5, 1.5, 1.5, 1.5]),
        # 0 beats 1 and 2 and ties with 3, 1 beats 2 and 3, 2 beats 3
        ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], [2.5, 2.0, 1.0, 0.5]),
    ],
)
def test_scores_of_four_responses(votes, scores):
    assert copeland_scores(4, dict(zip(all_pairs(4), votes, strict=True))) == scores


def test_a_cycle_scores_all_equal():
    # 0 beats 1, 1 beats 2, 2 beats 0
    assert copeland_scores(3, {(0, 1): 1.0, (0, 2): 0.0, (1, 2): 1.0}) == [1.0, 1.0, 1.0]


def test_one_response_has_no_points():
    assert copeland_scores(1, {}) == [0.0]


@pytest.mark.parametrize(
    ("votes", "scores", "pair"),
    [
        # 2 beats all, 0 beats 1 and 3, 3 beats 1
        ([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 3.0, 1.0], (2, 1)),
        # all tie
        ([0.5] * 6, [1.5, 1.5, 1.5, 1.5], None),
        # only 0 beats 1: it leads by one point; the others tie
        ([1.0, 0.5, 0.5, 0.5, 0.5, 0.5], [2.0, 1.0, 1.5, 1.5], (0, 1)),
        # the best (0) and the worst (3) tied with each other; of the comparisons with a winner,
        # 0 over 2 is the first with a lead of 1.5
        ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], [2.5, 2.0, 1.0, 0.5], (0, 2)),
        # 3 beats 0, which has as many points
        ([1.0, 1.0, 0.0, 1.0, 0.5, 0.5], [2.0, 1.5, 0.5, 2.0], (0, 2)),
    ],
)
def test_best_and_worst_of_four(votes, scores, pair):
    votes_by_pair = dict(zip(all_pairs(4), votes, strict=True))
    assert copeland_scores(4, votes_by_pair) == scores
    assert best_and_worst(scores, votes_by_pair) == pair


def test_a_cycle_has_no_best():
    # 0 beats 1, 2 beats 0, 1 beats 2
    assert best_and_worst([1.0, 1.0, 1.0], {(0, 1): 1.0, (0, 2): 0.0, (1, 2): 1.0}) is None
    assert best_and_worst([0.0], {}) is None
