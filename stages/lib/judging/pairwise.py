"""The interface of all judges: comparisons, verdicts, and judging in both orders.

A judge decides which of two responses to a prompt is better. Judges favour a position (Zheng et al.
2023, section 3.3), so each comparison is judged in both orders, and a preference counts only if
both orders agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from stages.lib.core.types import Metrics, Prompt

JURY = "together"  # key of the jury's common verdict, beside the names of its judges


class Preference(str, Enum):
    """Which response is better."""

    a = "A"
    b = "B"
    tie = "tie"

    def swapped(self) -> "Preference":
        """The same preference if A and B change places."""
        return {Preference.a: Preference.b, Preference.b: Preference.a}.get(self, self)


# Preference by the outcome for response A: win, tie, loss
PREFERENCE_BY_OUTCOME = {1.0: Preference.a, 0.5: Preference.tie, 0.0: Preference.b}
OUTCOME_BY_PREFERENCE = {value: key for key, value in PREFERENCE_BY_OUTCOME.items()}


@dataclass(frozen=True)
class Comparison:
    """Two responses, A and B, to one prompt.

    principle: of a constitution, by which a language model decides in place of its rubric.
    """

    prompt: Prompt
    a: str
    b: str
    principle: str | None = None

    def swapped(self) -> "Comparison":
        """The same comparison with A and B in each other's place."""
        return replace(self, a=self.b, b=self.a)


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one comparison.

    preference: the better response. confidence: 0..1; None if the judge reports none. dimensions:
    the preference in each dimension, if the judge was given several.
    """

    preference: Preference
    confidence: float | None = None
    dimensions: Mapping[str, Preference] = field(default_factory=dict)

    def swapped(self) -> "Verdict":
        """The same verdict if A and B change places."""
        dimensions = {name: preference.swapped() for name, preference in self.dimensions.items()}
        return Verdict(self.preference.swapped(), self.confidence, dimensions)


class PairwiseJudge(Protocol):
    """A judge that compares two responses to a prompt."""

    def describe(self) -> dict[str, str | None]:
        """Keys for each label by this judge: `judge`, its name, and further properties."""

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """Judge each comparison once, in the given order of A and B.

        Use `judge_both_orders` to remove the effect of the order.

        Returns:
            One verdict per comparison, in order; None if the judge gave no readable answer.

        Raises:
            BadInput: the judge's params are wrong, e.g. its API key is refused.
            Unreachable: the judge's server does not answer; a retry may succeed.
            RondoError: the judge returned something invalid, e.g. a score that is not finite.

        Example:
            >>> from stages.lib.judging.lexicon import LexiconJudge
            >>> judge = LexiconJudge(tie_margin=0.05)
            >>> [verdict] = judge.compare([Comparison("The food", " was great.", " was awful.")])
            >>> verdict.preference.value
            'A'
        """

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float] | None:
        """The score of each response alone, the higher the better; None if it only compares."""

    def cost(self) -> Metrics:
        """Metrics of all answers so far, with those from the cache, so that reruns are equal."""

    def usage(self) -> Metrics:
        """What this run of the stage requested and paid for, without answers from the cache."""


class LocalJudge:
    """Base of judges that run on this machine and cost nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self) -> dict[str, str | None]:
        return {"judge": self.name}

    def cost(self) -> Metrics:
        return {}

    def usage(self) -> Metrics:
        return {}


@dataclass(frozen=True)
class TwoOrderVerdict:
    """Verdicts on a comparison in both orders.

    second: the verdict with A and B swapped, converted back, so that "A" is the same response in
    both. None: no readable answer.
    """

    first: Verdict | None
    second: Verdict | None

    @property
    def readable(self) -> bool:
        """Whether the answers in both orders were readable."""
        return self.first is not None and self.second is not None

    @property
    def preference(self) -> Preference:
        """The preference if both orders agree, else a tie."""
        if self.first and self.second and self.first.preference == self.second.preference:
            return self.first.preference
        return Preference.tie

    @property
    def dimensions(self) -> dict[str, Preference]:
        """Per dimension the preference if both orders agree, else a tie."""
        if not self.first or not self.second:
            return {}
        pairs = (
            (name, preference, self.second.dimensions[name])
            for name, preference in self.first.dimensions.items()
        )
        return {name: first if first == second else Preference.tie for name, first, second in pairs}

    @property
    def confidence(self) -> float | None:
        """The lower confidence of the two verdicts; None if neither has one."""
        confidences = [
            verdict.confidence
            for verdict in (self.first, self.second)
            if verdict and verdict.confidence is not None
        ]
        return min(confidences, default=None)


def judge_both_orders(
    judge: PairwiseJudge, comparisons: Sequence[Comparison]
) -> list[TwoOrderVerdict]:
    """Judge each comparison as it is and with A and B swapped.

    Raises:
        RondoError: as `PairwiseJudge.compare`.
    """
    verdicts = judge.compare(
        [ordered for comparison in comparisons for ordered in (comparison, comparison.swapped())]
    )
    return [
        TwoOrderVerdict(first, second and second.swapped())
        for first, second in zip(verdicts[::2], verdicts[1::2], strict=True)
    ]
