"""Choose the preference pair of a prompt from comparisons of all its responses with each other.

Pure functions: no judge, no model, no file.
"""

from collections.abc import Mapping, Sequence

from stages.lib.judging.copeland import copeland_scores
from stages.lib.judging.pairwise import PREFERENCE_BY_OUTCOME, Preference

Preferences = Mapping[tuple[int, int], Preference]
"""The preferred one of responses (i, j) with i < j: A is i, B is j."""

VOTES = {preference: vote for vote, preference in PREFERENCE_BY_OUTCOME.items()}


def scores_from_preferences(n: int, preferences: Preferences) -> list[float]:
    """The Copeland scores of n responses, each between 0 and n - 1."""
    return copeland_scores(n, {pair: VOTES[choice] for pair, choice in preferences.items()})


def best_and_worst(scores: Sequence[float], preferences: Preferences) -> tuple[int, int] | None:
    """The (winner, loser) of the comparison whose winner leads by the most points.

    This is the best and the worst response, unless these two tied. Among equal leads the first
    comparison counts.

    Returns:
        None if there is no pair: all comparisons are ties, or no winner has more points than its
        loser (a cycle).
    """
    decided = [
        (i, j) if preference is Preference.a else (j, i)
        for (i, j), preference in preferences.items()
        if preference is not Preference.tie
    ]
    leading = [(winner, loser) for winner, loser in decided if scores[winner] > scores[loser]]
    return max(leading, key=lambda pair: scores[pair[0]] - scores[pair[1]], default=None)
