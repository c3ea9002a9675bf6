"""Corruptions of a good response, each of which must score below the original.

They keep the leading space, and the spacing of the words that stay in place.
"""

import random
from collections.abc import Mapping, Sequence

from stages.lib.core.types import Prompt
from stages.lib.metrics.text import is_unspaced, tokens, words

PromptResponse = tuple[Prompt, str]  # a prompt and its response


def corruptions(
    texts: Sequence[PromptResponse], worth: Mapping[str, float], seed: int
) -> dict[str, list[PromptResponse]]:
    """Corrupt every text in every way.

    Args:
        texts: prompts with their good responses.
        worth: value of each word, from `word_score_uplift`.
        seed: seed of word_salad; together with the response, so that a text is always corrupted in
            the same way.

    Returns:
        By corruption, the corrupted texts in the order of `texts`. `prompt_swapped` puts the
        response after the next prompt that differs; with very short prompts it means little.
    """
    prompts = [prompt for prompt, _ in texts]
    following = [[*prompts[index + 1 :], *prompts[:index]] for index in range(len(prompts))]
    others = [
        next((other for other in rest if other != prompt), prompt)
        for prompt, rest in zip(prompts, following, strict=True)
    ]
    return {
        "word_salad": [
            (prompt, word_salad(response, random.Random(f"{seed} {response}")))
            for prompt, response in texts
        ],
        "repeated_word": [(prompt, repeated_word(response, worth)) for prompt, response in texts],
        "truncated": [(prompt, truncated(response)) for prompt, response in texts],
        "prompt_swapped": [
            (other, response) for other, (_, response) in zip(others, texts, strict=True)
        ],
        "empty": [(prompt, "") for prompt in prompts],
    }


def word_salad(text: str, generator: random.Random) -> str:
    """The words in random order, different from the original one."""
    written = [word[0] for word in words(text)]
    mixed = generator.sample(written, len(written))
    if mixed == written:  # with two words this is every second draw
        mixed = [*written[1:], *written[:1]]
    return _leading_space(text) + _joined(mixed)


def repeated_word(text: str, worth: Mapping[str, float]) -> str:
    """The text's most valuable word, repeated as often as the text has words.

    A word without a known worth counts 0. A text without words is returned as it is.
    """
    candidates = sorted(word for word in tokens(text) if word[0].isalnum())
    best = max(candidates, key=lambda word: worth.get(word, 0.0), default="")
    return _leading_space(text) + _joined([best] * len(list(words(text)))) if best else text


def truncated(text: str) -> str:
    """The first half of the words, rounded down."""
    written = list(words(text))
    return text[: written[len(written) // 2 - 1].end()] if len(written) > 1 else ""


def word_score_uplift(texts: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """How far above the mean the texts with each word score.

    This finds the words that a reward model prefers without scoring more texts. Each value is
    shrunk as if one more text with the word had the mean score, so that a word in a single
    high-scoring text does not win by luck.

    Returns:
        By word, its uplift in units of the scores.
    """
    mean = sum(scores) / len(scores)
    above: dict[str, list[float]] = {}
    for text, score in zip(texts, scores, strict=True):
        for word in set(tokens(text)):
            above.setdefault(word, []).append(score - mean)
    return {word: sum(values) / (len(values) + 1) for word, values in above.items()}


def _joined(written: Sequence[str]) -> str:
    """Words with a space before each one that is not of a script without spaces."""
    return "".join(word if is_unspaced(word) else f" {word}" for word in written).removeprefix(" ")


def _leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
