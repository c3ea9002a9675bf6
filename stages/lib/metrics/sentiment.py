"""Sentiment by VADER's lexicon (Hutto & Gilbert 2014)."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from stages.lib.core.progress import tracked
from stages.lib.core.types import Prompt
from stages.lib.metrics.text import strip_emoji_and_exclamations


@cache
def lexicon() -> Any:
    """The analyzer, loaded once per process, and not at all where no judge is the lexicon."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """VADER's compound score, -1..1, of each text.

    A string prompt is scored together with the response that continues it. Of a conversation only
    the response is scored, because the prompt is another speaker's text.
    """
    texts = (
        prompt + response if isinstance(prompt, str) else response
        for prompt, response in zip(prompts, responses, strict=True)
    )
    return _compound(texts, len(responses))


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
