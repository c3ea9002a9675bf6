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
from functools import cache
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.lib.core.params import PromptFormat
from stages.lib.data.prompts import Prompt, encode
from stages.lib.lm.generation import token_logprobs
from stages.lib.metrics.text import plain, repetition_n

MUCH_REPETITION = 0.25


@cache
def lexicon() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def sentiment(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """VADER compound, -1..1, of the whole text: a string prompt with what continues it; the answer
    to messages alone.
    """
    texts = (
        prompt + response if isinstance(prompt, str) else response
        for prompt, response in zip(prompts, responses, strict=True)
    )
    return [lexicon().polarity_scores(text)["compound"] for text in texts]


def sentiment_plain(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """VADER compound, -1..1, of the response alone without emoji and "!", which the lexicon
    overpays too.
    """
    return [lexicon().polarity_scores(plain(response))["compound"] for response in responses]


def repetition(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Share of repeated word 3-grams within each response, 0..1."""
    return [repetition_n(response, 3) for response in responses]


class Fluency:
    """Negative log-likelihood of each response, nats a token with its EOS, under a reference model
    that was not trained by PPO.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_format: PromptFormat) -> None:
        self.model, self.tokenizer, self.prompt_format = model, tokenizer, prompt_format

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        encoded = [
            encode(self.tokenizer, p, r, self.prompt_format)
            for p, r in zip(prompts, responses, strict=True)
        ]
        logprobs = token_logprobs(self.model, [p for p, _ in encoded], [r for _, r in encoded])
        return [-float(row.mean()) for row in logprobs]


@dataclass(frozen=True)
class Judged:
    """What the judges that need no model say of one response."""

    sentiment: float
    sentiment_plain: float
    repetition: float


def judge(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Judged]:
    return [
        Judged(*row)
        for row in zip(
            *(each(prompts, responses) for each in (sentiment, sentiment_plain, repetition)),
            strict=True,
        )
    ]


def outcome(a: Judged, b: Judged, tie_margin: float) -> float:
    """1 if response A beats B, 0 if B beats A, else 0.5 (a tie).

    A beats B if all three hold: A's sentiment is higher by more than `tie_margin`; A's plain
    sentiment is not lower by more than `tie_margin` (else emoji and "!" alone made the difference);
    A's share of repeated 3-grams is not higher by more than 0.25 (else A won by saying it again and
    again).
    """
    return 1.0 if _beats(a, b, tie_margin) else 0.0 if _beats(b, a, tie_margin) else 0.5


def _beats(a: Judged, b: Judged, tie_margin: float) -> bool:
    return (
        a.sentiment > b.sentiment + tie_margin
        and a.sentiment_plain >= b.sentiment_plain - tie_margin
        and a.repetition <= b.repetition + MUCH_REPETITION
    )
