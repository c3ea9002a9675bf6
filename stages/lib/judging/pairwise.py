"""What a judge of preferences is, and what two orders of the same question tell of it.

A judge says which of two responses to a prompt is better. Judges favour a position (Zheng et al.
2023, section 3.3), so each comparison is asked in both orders, and a preference counts only where
both agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from stages.lib.core.types import Prompt, Row

JURY = "together"  # the name of what several judges say as one


class Preference(str, Enum):
    a = "A"
    b = "B"
    tie = "tie"

    def swapped(self) -> "Preference":
        return {Preference.a: Preference.b, Preference.b: Preference.a}.get(self, self)


PREFERENCE = {1.0: Preference.a, 0.5: Preference.tie, 0.0: Preference.b}


@dataclass(frozen=True)
class Comparison:
    """Responses A and B to one prompt."""

    prompt: Prompt
    a: str
    b: str

    def swapped(self) -> "Comparison":
        return Comparison(self.prompt, self.b, self.a)


@dataclass(frozen=True)
class Verdict:
    """confidence: 0..1, None where the judge gives none. dimensions: what it prefers in each, where
    it was asked of several.
    """

    preference: Preference
    confidence: float | None = None
    dimensions: Mapping[str, Preference] = field(default_factory=dict)

    def swapped(self) -> "Verdict":
        dimensions = {name: preference.swapped() for name, preference in self.dimensions.items()}
        return Verdict(self.preference.swapped(), self.confidence, dimensions)


class PairwiseJudge(Protocol):
    """One that gives absolute numbers compares them itself."""

    def describe(self) -> Row:
        """What goes with each of its labels: `judge`, its name, and what else tells it from others."""

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """A verdict each; None where the judge said nothing that can be read."""

    def cost(self) -> Row:
        """Metrics of what was asked so far, the same whether or not an answer was known from an
        earlier run.
        """

    def usage(self) -> Row:
        """What this run of the stage asked for and paid."""


@dataclass(frozen=True)
class TwoOrderVerdict:
    """A comparison in both orders: `second` was asked with A and B swapped, and is told in terms of
    `first`.
    """

    first: Verdict | None
    second: Verdict | None

    @property
    def readable(self) -> bool:
        return self.first is not None and self.second is not None

    @property
    def preference(self) -> Preference:
        """What both orders prefer, else a tie."""
        if self.first and self.second and self.first.preference == self.second.preference:
            return self.first.preference
        return Preference.tie

    @property
    def dimensions(self) -> dict[str, Preference]:
        """By dimension what both orders prefer, else a tie."""
        if not self.first or not self.second:
            return {}
        pairs = (
            (name, said, self.second.dimensions[name])
            for name, said in self.first.dimensions.items()
        )
        return {name: said if said == again else Preference.tie for name, said, again in pairs}

    @property
    def confidence(self) -> float | None:
        """The lower of both."""
        given = [
            verdict.confidence
            for verdict in (self.first, self.second)
            if verdict and verdict.confidence is not None
        ]
        return min(given, default=None)


def judge_both_orders(
    judge: PairwiseJudge, comparisons: Sequence[Comparison]
) -> list[TwoOrderVerdict]:
    """Each comparison's question and its swapped one, asked one after the other, so that a run that
    is stopped has whole ones.
    """
    told = judge.compare([question for each in comparisons for question in (each, each.swapped())])
    return [
        TwoOrderVerdict(first, second and second.swapped())
        for first, second in zip(told[::2], told[1::2], strict=True)
    ]


class LocalJudge:
    """What it says costs nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self) -> Row:
        return {"judge": self.name}

    def cost(self) -> Row:
        return {}

    def usage(self) -> Row:
        return {}
