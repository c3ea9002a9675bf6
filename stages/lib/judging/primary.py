"""The primary judge: the first one of evaluate.judges.

It selects the policy to keep, and its scores stand beside those of the reward model in all tables.
None of its scores is a reward. A judge that only compares, e.g. a language model, has no scores:
then a response has the outcome of its comparison with a reference response.
"""

from collections.abc import Sequence

from stages.lib.core.types import Prompt
from stages.lib.judging.pairwise import (
    OUTCOME_BY_PREFERENCE,
    Comparison,
    PairwiseJudge,
    judge_both_orders,
)

TIE = 0.5


class PrimaryJudge:
    """Args:
    name: the judge's name in metrics.
    judge: the judge.

    Example:
        >>> from stages.lib.judging.pointwise import PointwiseJudge
        >>> length = PointwiseJudge("length", lambda p, texts: [len(text) for text in texts], 0)
        >>> judge = PrimaryJudge("length", length)
        >>> judge.scores(["Hi"], ["you"]), judge.outcomes(["Hi"], ["you"], ["all of you"])
        ([3], [0.0])
    """

    def __init__(self, name: str, judge: PairwiseJudge) -> None:
        self.name, self.judge = name, judge

    @property
    def only_compares(self) -> bool:
        """Whether the judge has no scores."""
        return self.judge.scores([], []) is None

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float] | None:
        """(N,) scores of N responses, in the judge's unit; None if the judge only compares."""
        return self.judge.scores(prompts, responses)

    def outcomes(
        self, prompts: Sequence[Prompt], a: Sequence[str], b: Sequence[str]
    ) -> list[float]:
        """(N,) outcomes for the N responses of `a` against those of `b`: 1 win, 0.5 tie, 0 loss.

        Equal responses tie without being judged.
        """
        comparisons = [Comparison(*texts) for texts in zip(prompts, a, b, strict=True)]
        different = [comparison for comparison in comparisons if comparison.a != comparison.b]
        verdicts = iter(judge_both_orders(self.judge, different))
        return [
            TIE
            if comparison.a == comparison.b
            else OUTCOME_BY_PREFERENCE[next(verdicts).preference]
            for comparison in comparisons
        ]

    def scores_against(
        self, prompts: Sequence[Prompt], responses: Sequence[str], references: Sequence[str]
    ) -> list[float]:
        """(N,) scores of N responses; if the judge only compares, outcomes against `references`."""
        scores = self.scores(prompts, responses)
        return self.outcomes(prompts, responses, references) if scores is None else scores
