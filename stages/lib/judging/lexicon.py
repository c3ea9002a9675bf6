"""The lexicon judge: sentiment by VADER, with two rules against the simplest reward hacks.

It needs no model, but measures little: the lexicon (Hutto & Gilbert 2014) knows the polarity of
words and nothing about truth, helpfulness or harm. That is the task of the embedded tweets. On
dialogues (hh-rlhf) it measures how friendly a response sounds: name a judge of your own in
`evaluate.judges` (stages/lib/judging/jury.py) before you promote a policy on such data.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from stages.lib.core.progress import tracked
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import whole_texts
from stages.lib.judging.pairwise import PREFERENCE_BY_OUTCOME, Comparison, LocalJudge, Verdict
from stages.lib.metrics.text import repetition_n, strip_emoji_and_exclamations


@cache
def lexicon() -> Any:
    """The analyzer, loaded once per process, and not at all where no judge is the lexicon."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """VADER's compound score, -1..1, of each text (see `whole_texts`)."""
    return _compound(whole_texts(prompts, responses), len(responses))


def sentiment_plain(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """VADER's compound score, -1..1, of each response alone, without emoji and "!".

    The lexicon scores emoji and "!" too high, as reward models do.
    """
    return _compound(map(strip_emoji_and_exclamations, responses), len(responses))


def _compound(texts: Iterable[str], number: int) -> list[float]:
    return [
        lexicon().polarity_scores(text)["compound"]
        for text in tracked("sentiment", texts, number, "texts")
    ]


MUCH_REPETITION = 0.25  # share of repeated 3-grams by which a winner may exceed the loser


def repetition(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Share of repeated word 3-grams within each response, 0..1."""
    return [repetition_n(response, 3) for response in responses]


@dataclass(frozen=True)
class LexiconScores:
    """What the lexicon judge reads of one response.

    sentiment: VADER's compound score, -1..1. sentiment_plain: the same without emoji and "!".
    repetition: share of repeated 3-grams, 0..1.
    """

    sentiment: float
    sentiment_plain: float
    repetition: float


def lexicon_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[LexiconScores]:
    """The scores of each response."""
    columns = (score(prompts, responses) for score in (sentiment, sentiment_plain, repetition))
    return [LexiconScores(*row) for row in zip(*columns, strict=True)]


def lexicon_preference(a: LexiconScores, b: LexiconScores, tie_margin: float) -> float:
    """1 if response A beats B, 0 if B beats A, else 0.5 (a tie).

    A beats B if all of these hold:

    - A's sentiment is higher by more than `tie_margin`.
    - A's plain sentiment is not lower by more than `tie_margin`. Else emoji and "!" alone made the
      difference.
    - A's share of repeated 3-grams is not higher by more than 0.25. Else A won by repetition.
    """
    return 1.0 if _beats(a, b, tie_margin) else 0.0 if _beats(b, a, tie_margin) else 0.5


def _beats(a: LexiconScores, b: LexiconScores, tie_margin: float) -> bool:
    return (
        a.sentiment > b.sentiment + tie_margin
        and a.sentiment_plain >= b.sentiment_plain - tie_margin
        and a.repetition <= b.repetition + MUCH_REPETITION
    )


class LexiconJudge(LocalJudge):
    """Judges by `lexicon_preference`; its confidence is half the difference of the sentiments."""

    def __init__(self, tie_margin: float) -> None:
        super().__init__("lexicon")
        self.tie_margin = tie_margin

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """The sentiments, without the two rules: these compare."""
        return sentiment(prompts, responses)

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        prompts = [comparison.prompt for comparison in comparisons]
        sides = (
            lexicon_scores(prompts, [comparison.a for comparison in comparisons]),
            lexicon_scores(prompts, [comparison.b for comparison in comparisons]),
        )
        return [
            Verdict(
                PREFERENCE_BY_OUTCOME[lexicon_preference(a, b, self.tie_margin)],
                abs(a.sentiment - b.sentiment) / 2,
            )
            for a, b in zip(*sides, strict=True)
        ]
