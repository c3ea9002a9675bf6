"""Phrases that a reward model's favourites have more often than other samples: what a policy would
learn to say.
"""

import math
from collections import Counter
from collections.abc import Sequence

from stages.lib.metrics.text import phrases, tokens

BEST = 4  # the best of so many samples are the favourites
SURE = 1.96  # standard errors by which a phrase has to be over-represented


def mine_phrases(texts: Sequence[str], scores: Sequence[float], most: int) -> list[str]:
    """At most `most` phrases of 1 to 3 tokens over-represented in the top quarter by score, surest
    first, none within another.
    """
    order = sorted(range(len(texts)), key=lambda place: -scores[place])
    top = len(texts) // BEST
    if not top:
        return []
    theirs, others = (
        Counter(phrase for place in part for phrase in phrases(texts[place]))
        for part in (order[:top], order[top:])
    )
    sure = {
        phrase: log_odds(count, top, others[phrase], len(texts) - top)
        for phrase, count in theirs.items()
    }
    kept: list[str] = []
    for phrase in sorted(
        (each for each, z in sure.items() if z >= SURE), key=lambda each: (-sure[each], each)
    ):
        if not any(within(phrase, other) or within(other, phrase) for other in kept):
            kept.append(phrase)
    return kept[:most]


def within(phrase: str, other: str) -> bool:
    inner, outer = (f" {' '.join(tokens(each))} " for each in (phrase, other))
    return inner in outer


def log_odds(a: int, of_a: int, b: int, of_b: int) -> float:
    """The log odds ratio of `a` in `of_a` texts to `b` in `of_b`, in its standard errors, with a
    half in each cell (Haldane 1956).
    """
    cells = [a + 0.5, of_a - a + 0.5, b + 0.5, of_b - b + 0.5]
    return (math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])) / math.sqrt(
        sum(1 / cell for cell in cells)
    )
