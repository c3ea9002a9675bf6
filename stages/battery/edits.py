"""Edits of a response that keep its meaning, so that they must not change which of two is better.

Three of the transformations of reWordBench (Wu et al. 2025, arXiv 2503.11751), which found that
reward models with an accuracy above 95% fall to 73% by the format of the answer alone.
"""

import random
from collections.abc import Callable

from stages.lib.core.params.evaluation import Edit


def lower_case(text: str, _: random.Random) -> str:
    return text.lower()


def quoted(text: str, _: random.Random) -> str:
    """In quotation marks, after the leading space."""
    stripped = text.strip()
    return text.replace(stripped, f'"{stripped}"', 1) if stripped else text


def typo(text: str, generator: random.Random) -> str:
    """Two neighbouring inner letters of one word of four or more letters swapped.

    A text without such a word is returned as it is.
    """
    places = [
        index
        for index in range(1, len(text) - 2)
        if text[index - 1 : index + 3].isalpha() and text[index] != text[index + 1]
    ]
    if not places:
        return text
    index = generator.choice(places)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]


EDITS: dict[Edit, Callable[[str, random.Random], str]] = {
    Edit.lower_case: lower_case,
    Edit.quoted: quoted,
    Edit.typo: typo,
}
