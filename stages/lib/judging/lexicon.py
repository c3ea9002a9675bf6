"""What can be said of a text without asking anybody: its mood, its repetitions, how fluent a model
finds it.

Each takes prompts and responses and gives one number a response. What they measure is narrow: the
lexicon (VADER, Hutto & Gilbert 2014) knows the polarity of words and nothing of truth, help or
harm. It is the task of the embedded tweets; on dialogues (hh-rlhf) it says how friendly an answer
sounds: name a judge of your own in `evaluate.judges` (stages/lib/judging/jury.py) before you
promote on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.lib.core.types import Prompt
from stages.lib.judging.pairwise import PREFERENCE, Comparison, LocalJudge, Verdict
from stages.lib.metrics.sentiment import sentiment, sentiment_plain
from stages.lib.metrics.text import repetition_n

MUCH_REPETITION = 0.25


def repetition(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Share of repeated word 3-grams within each response, 0..1."""
    return [repetition_n(response, 3) for response in responses]


@dataclass(frozen=True)
class LexiconScores:
    """What the judges that need no model say of one response."""

    sentiment: float
    sentiment_plain: float
    repetition: float


def lexicon_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[LexiconScores]:
    return [
        LexiconScores(*row)
        for row in zip(
            *(each(prompts, responses) for each in (sentiment, sentiment_plain, repetition)),
            strict=True,
        )
    ]


def lexicon_preference(a: LexiconScores, b: LexiconScores, tie_margin: float) -> float:
    """1 if response A beats B, 0 if B beats A, else 0.5 (a tie).

    A beats B if all three hold: A's sentiment is higher by more than `tie_margin`; A's plain
    sentiment is not lower by more than `tie_margin` (else emoji and "!" alone made the difference);
    A's share of repeated 3-grams is not higher by more than 0.25 (else A won by saying it again and
    again).
    """
    return 1.0 if _beats(a, b, tie_margin) else 0.0 if _beats(b, a, tie_margin) else 0.5


def _beats(a: LexiconScores, b: LexiconScores, tie_margin: float) -> bool:
    return (
        a.sentiment > b.sentiment + tie_margin
        and a.sentiment_plain >= b.sentiment_plain - tie_margin
        and a.repetition <= b.repetition + MUCH_REPETITION
    )


class LexiconJudge(LocalJudge):
    """The verdict of stages/lib/judging/lexicon.py; its confidence is half the distance of the
    judged sentiments.
    """

    def __init__(self, tie_margin: float) -> None:
        super().__init__("lexicon")
        self.tie_margin = tie_margin

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        prompts = [each.prompt for each in comparisons]
        sides = (
            lexicon_scores(prompts, [each.a for each in comparisons]),
            lexicon_scores(prompts, [each.b for each in comparisons]),
        )
        return [
            Verdict(
                PREFERENCE[lexicon_preference(a, b, self.tie_margin)],
                abs(a.sentiment - b.sentiment) / 2,
            )
            for a, b in zip(*sides, strict=True)
        ]
