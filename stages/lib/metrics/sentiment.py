"""Sentiment by VADER's lexicon (Hutto & Gilbert 2014)."""

from collections.abc import Sequence
from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.lib.core.types import Prompt
from stages.lib.metrics.text import strip_emoji_and_exclamations


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
    return [
        lexicon().polarity_scores(strip_emoji_and_exclamations(response))["compound"]
        for response in responses
    ]
