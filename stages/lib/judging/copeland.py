"""Copeland scores: rank N responses from a comparison of each response with every other one.

Pure functions on indices and votes: no judge, no model, no file.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations


def all_pairs(n: int) -> list[tuple[int, int]]:
    """The n (n - 1) / 2 index pairs (i, j) with i < j."""
    return list(combinations(range(n), 2))


def copeland_scores(n: int, votes: Mapping[tuple[int, int], float]) -> list[float]:
    """Score n responses by their wins: 1 point per response beaten, half a point per tie.

    Args:
        n: number of responses.
        votes: {(i, j): 1 if response i wins, 0.5 for a tie, 0 if response j wins}, by `all_pairs`.

    Returns:
        (n,) scores between 0 and n - 1.

    Example:
        >>> copeland_scores(3, {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0})
        [1.5, 0.0, 1.5]
    """
    scores = [0.0] * n
    for (i, j), vote in votes.items():
        scores[i] += vote
        scores[j] += 1 - vote
    return scores


def best_and_worst(
    scores: Sequence[float], votes: Mapping[tuple[int, int], float]
) -> tuple[int, int] | None:
    """The (winner, loser) of the comparison whose winner leads by the most points.

    This is the best and the worst response, unless these two tied. Among equal leads the first
    comparison counts.

    Args:
        scores: (n,) Copeland scores.
        votes: as in `copeland_scores`.

    Returns:
        None if there is no pair: all comparisons are ties, or no winner has more points than its
        loser (a cycle).

    Example:
        >>> best_and_worst([1.5, 0.0, 1.5], {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0})
        (0, 1)
    """
    decided = [(i, j) if vote > 0.5 else (j, i) for (i, j), vote in votes.items() if vote != 0.5]
    leading = [(winner, loser) for winner, loser in decided if scores[winner] > scores[loser]]
    return max(leading, key=lambda pair: scores[pair[0]] - scores[pair[1]], default=None)
