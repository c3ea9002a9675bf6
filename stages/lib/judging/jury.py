"""The jury: the judges of `evaluate.judges`, each alone and all together.

The jury prefers the response that more judges prefer. A tie is half a vote for each side, so that a
judge that cannot decide does not change the result. None of the judges is the reward model that PPO
optimises.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from stages.lib.core.types import Metrics
from stages.lib.judging.agreement import between_judges, between_orders
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

        Raises:
            RondoError: as `PairwiseJudge.compare`.
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
    ties = sum(verdict.preference is Preference.tie for verdict in verdicts)
    return ties / len(verdicts) if verdicts else None


def majority(votes: Sequence[float]) -> float:
    """The outcome that more judges vote for.

    >>> majority([1.0, 0.5]), majority([1.0, 0.0]), majority([1.0, 0.0, 0.0])
    (1.0, 0.5, 0.0)
    """
    mean = sum(votes) / len(votes)
    return 1.0 if mean > 0.5 else 0.0 if mean < 0.5 else 0.5
