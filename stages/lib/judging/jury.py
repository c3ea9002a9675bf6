"""The jury: the judges of `evaluate.judges`, each alone and all together.

The jury prefers the response that more judges prefer. A tie is half a vote for each side, so that a
judge that cannot decide does not change the result. None of the judges is the reward model that PPO
optimises.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from sklearn.metrics import cohen_kappa_score

from stages.lib.core.types import Metrics
from stages.lib.judging.pairwise import (
    JURY,
    OUTCOME_BY_PREFERENCE,
    Comparison,
    PairwiseJudge,
    Preference,
    TwoOrderVerdict,
    judge_both_orders,
)
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.metrics.stats import mean, wilson_interval


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


def agreement(answers: Sequence[tuple[str, str]], name: str) -> dict[str, float | None]:
    """Agreement of two raters.

    Args:
        answers: the two raters' answers per item.
        name: of the share of equal answers among the results.

    Returns:
        That share, and `kappa`, Cohen's kappa (1960), which corrects for chance. Both are None
        without items; kappa also if all answers are the same.
    """
    if not answers:
        return {name: None, "kappa": None}
    first, second = zip(*answers, strict=True)
    kappa = float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else None
    return {name: mean([one == other for one, other in answers]), "kappa": kappa}


def between_orders(judgements: Sequence[TwoOrderVerdict]) -> dict[str, float | None]:
    """`agreement` of a judge with itself when A and B change places (`position_consistency`), of
    comparisons with two readable answers.
    """
    orders = [
        (verdicts.first.preference.value, verdicts.second.preference.value)
        for verdicts in judgements
        if verdicts.first and verdicts.second
    ]
    return agreement(orders, "position_consistency")


def between_judges(
    first_judge: Sequence[TwoOrderVerdict], second_judge: Sequence[TwoOrderVerdict]
) -> dict[str, float | None]:
    """`agreement` of two judges on the same comparisons, ties included."""
    pairs = zip(first_judge, second_judge, strict=True)
    return agreement([(a.preference.value, b.preference.value) for a, b in pairs], "agreement")


def human_agreement(judgements: Sequence[TwoOrderVerdict]) -> dict[str, Any]:
    """Agreement of a judge with people, on comparisons whose response A people chose.

    Returns:
        rate: share of the decided comparisons in which the judge prefers A, with its 95% interval
        low, high; pairs: number of decided comparisons; ties; unparsable: comparisons without two
        readable answers. rate, low and high are None if no comparison was decided.
    """
    decided = [
        verdicts.preference for verdicts in judgements if verdicts.preference is not Preference.tie
    ]
    correct = sum(preference is Preference.a for preference in decided)
    low, high = wilson_interval(correct, len(decided)) if decided else (None, None)
    unparsable = sum(not verdicts.readable for verdicts in judgements)
    return {
        "rate": correct / len(decided) if decided else None,
        "low": low,
        "high": high,
        "pairs": len(decided),
        "ties": len(judgements) - len(decided) - unparsable,
        "unparsable": unparsable,
    }


class Jury:
    """Several judges, by name.

    `primary` is the first judge. `verdicts` keeps the verdicts of each judge on all comparisons so
    far, for `report`.
    """

    def __init__(self, judges: Mapping[str, PairwiseJudge]) -> None:
        self.judges = judges
        self.primary = PrimaryJudge(*next(iter(judges.items())))
        self.verdicts: dict[str, list[TwoOrderVerdict]] = {name: [] for name in judges}

    def compare(self, comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
        """Judge comparisons in both orders.

        Returns:
            Outcomes per comparison: 1 if A wins, 0.5 for a tie, 0 if B wins. They are listed by
            judge, by `<judge>/<dimension>` for a judge with several dimensions, and by `together`
            for the whole jury, in which each judge has one vote.
        """
        votes: dict[str, list[float]] = {}
        by_dimension: dict[str, list[float]] = {}
        for name, judge in self.judges.items():
            verdicts = judge_both_orders(judge, comparisons)
            self.verdicts[name] += verdicts
            votes[name] = [OUTCOME_BY_PREFERENCE[verdict.preference] for verdict in verdicts]
            # dict.fromkeys: distinct dimensions in their order
            for dimension in dict.fromkeys(
                dimension for verdict in verdicts for dimension in verdict.dimensions
            ):
                by_dimension[f"{name}/{dimension}"] = [
                    OUTCOME_BY_PREFERENCE[verdict.dimensions.get(dimension, Preference.tie)]
                    for verdict in verdicts
                ]
        together = [majority(outcomes) for outcomes in zip(*votes.values(), strict=True)]
        return votes | by_dimension | {JURY: together}

    def report(self) -> Metrics:
        """Reliability of the judges on all comparisons so far.

        Returns:
            `alone`: per judge, the share of comparisons in which it calls a tie (None without
            comparisons), its agreement with itself in the other order, the number of comparisons,
            those without two readable answers (`unparsable`), and its cost; `pairs`: per pair of
            judges, their agreement.
        """
        verdicts = self.verdicts
        return {
            "alone": {
                name: {
                    "tie_share": tie_share(verdicts[name]),
                    **between_orders(verdicts[name]),
                    "comparisons": len(verdicts[name]),
                    "unparsable": sum(not verdict.readable for verdict in verdicts[name]),
                    **judge.cost(),
                }
                for name, judge in self.judges.items()
            },
            "pairs": {
                f"{a}-{b}": between_judges(verdicts[a], verdicts[b])
                for a, b in combinations(verdicts, 2)
            },
        }


def tie_share(verdicts: Sequence[TwoOrderVerdict]) -> float | None:
    ties = [verdict.preference is Preference.tie for verdict in verdicts]
    return mean(ties) if ties else None


def majority(votes: Sequence[float]) -> float:
    """The outcome that more judges vote for.

    >>> majority([1.0, 0.5]), majority([1.0, 0.0]), majority([1.0, 0.0, 0.0])
    (1.0, 0.5, 0.0)
    """
    share = mean(votes)
    return 1.0 if share > 0.5 else 0.0 if share < 0.5 else 0.5
