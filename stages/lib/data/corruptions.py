"""Corruptions of a good answer, each of which has to score below it. Leading space and the spacing
of what is left stay.
"""

import random
import re
from collections.abc import Mapping, Sequence

from stages.lib.core.types import Prompt
from stages.lib.metrics.text import tokens

WORD = re.compile(r"\S+")
PromptResponse = tuple[Prompt, str]  # a prompt and its response


def corruptions(
    texts: Sequence[PromptResponse], worth: Mapping[str, float], seed: int
) -> dict[str, list[PromptResponse]]:
    """Every text as each probe makes it, in order. `worth`: of words, by `word_score_uplift`.

    prompt_swapped puts the response after the next text's other prompt: of little meaning where a
    prompt is a word or two.
    """
    prompts = [prompt for prompt, _ in texts]
    turned = [[*prompts[place + 1 :], *prompts[:place]] for place in range(len(prompts))]
    others = [
        next((other for other in rest if other != prompt), prompt)
        for prompt, rest in zip(prompts, turned, strict=True)
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
    words = text.split()
    mixed = generator.sample(words, len(words))
    return _lead(text) + " ".join(
        mixed if mixed != words else [*words[1:], *words[:1]]
    )  # of two words every other draw is no change


def repeated_word(text: str, worth: Mapping[str, float]) -> str:
    """As many words as the text has, all of them the one of its words that is worth most; a word of
    unknown worth counts 0.
    """
    words = sorted(word for word in tokens(text) if word[0].isalnum())
    best = max(words, key=lambda word: worth.get(word, 0.0), default="")
    return _lead(text) + " ".join([best] * len(text.split())) if best else text


def truncated(text: str) -> str:
    """The first half of the words, the smaller one of an odd number."""
    words = list(WORD.finditer(text))
    return text[: words[len(words) // 2 - 1].end()] if len(words) > 1 else ""


def word_score_uplift(texts: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """How far above the mean the texts with a word score, as if one more text with it scored just
    the mean.

    So the words that a reward model loves are found without another score, and a word that is there
    once is no winner by luck.
    """
    mean = sum(scores) / len(scores)
    above: dict[str, list[float]] = {}
    for text, score in zip(texts, scores, strict=True):
        for word in set(tokens(text)):
            above.setdefault(word, []).append(score - mean)
    return {word: sum(each) / (len(each) + 1) for word, each in above.items()}


def _lead(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
