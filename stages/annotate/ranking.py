"""The ranking of N responses by comparisons of each with each, and the pair that it gives. Pure: no
judge, no model, no file.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from stages.lib.judging.pairwise import Preference

Table = Mapping[tuple[int, int], Preference]
"""What is preferred of responses (i, j), i < j: A is i, B is j."""


def all_pairs(n: int) -> list[tuple[int, int]]:
    """Each of n responses against each: n (n - 1) / 2 comparisons."""
    return list(combinations(range(n), 2))


def copeland(n: int, table: Table) -> list[float]:
    """Copeland scores: a point for each response that one is preferred to, half a point for a tie;
    0 to n - 1.
    """
    scores = [0.0] * n
    for (i, j), preference in table.items():
        scores[i] += {Preference.a: 1.0, Preference.tie: 0.5, Preference.b: 0.0}[preference]
        scores[j] += {Preference.a: 0.0, Preference.tie: 0.5, Preference.b: 1.0}[preference]
    return scores


def best_and_worst(scores: Sequence[float], table: Table) -> tuple[int, int] | None:
    """Of the matches that have a winner, the one whose winner leads its loser by the most points,
    as (winner, loser); the first of equals.

    This is the best and the worst response, unless they tied with each other. None: nobody wins, or
    winners do not lead (a circle).
    """
    won = [
        (i, j) if preference is Preference.a else (j, i)
        for (i, j), preference in table.items()
        if preference is not Preference.tie
    ]
    led = [(winner, loser) for winner, loser in won if scores[winner] > scores[loser]]
    return max(led, key=lambda match: scores[match[0]] - scores[match[1]], default=None)
