"""Phrases that are more frequent in texts with high reward scores than in others.

A policy would learn to write them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stages.battery.best_of_n import ScoredSamples
from stages.lib.core.files import is_placeholder
from stages.lib.data.rollouts import read_rollouts
from stages.lib.metrics.text import phrases, tokens

TOP_PART = 4  # the top group is one of so many equal parts by score: the top quarter
MIN_Z = 1.96  # standard errors by which a phrase has to be over-represented
MAX_PHRASES = 3  # per source


def phrases_to_try(previous: Path, samples: ScoredSamples, listed: Sequence[str]) -> list[str]:
    """Phrases of the previous round's rollouts, then of the SFT samples, without the listed ones.

    The rollouts have the scores of the reward model that their policy was trained with. The first
    round has no previous one.
    """
    mined: list[str] = []
    if not is_placeholder(previous / "ppo/rollouts"):
        responses, scores = [], []
        for row in read_rollouts(previous / "ppo/rollouts"):
            responses.append(row["response"])
            scores.append(row["score"])
        mined += mine_phrases(responses, scores, MAX_PHRASES)
    mined += mine_phrases(samples.texts, samples.scores, MAX_PHRASES)
    return [phrase for phrase in dict.fromkeys(mined) if phrase not in listed]


def mine_phrases(texts: Sequence[str], scores: Sequence[float], limit: int) -> list[str]:
    """At most `limit` phrases of 1 to 3 tokens that are over-represented in the top quarter.

    The phrase with the highest z-score comes first; none is contained in another.
    """
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    top = len(texts) // TOP_PART
    if not top:
        return []
    top_counts, other_counts = (
        Counter(phrase for index in indices for phrase in phrases(texts[index]))
        for indices in (order[:top], order[top:])
    )
    z_scores = {
        phrase: log_odds(count, top, other_counts[phrase], len(texts) - top)
        for phrase, count in top_counts.items()
    }
    over_represented = [phrase for phrase, z in z_scores.items() if z >= MIN_Z]
    kept: list[str] = []
    for phrase in sorted(over_represented, key=lambda phrase: (-z_scores[phrase], phrase)):
        if not any(within(phrase, other) or within(other, phrase) for other in kept):
            kept.append(phrase)
    return kept[:limit]


def within(phrase: str, other: str) -> bool:
    """Whether the words of `phrase` are contained in `other`, in order and without a gap."""
    inner, outer = (f" {' '.join(tokens(text))} " for text in (phrase, other))
    return inner in outer


def log_odds(a: int, of_a: int, b: int, of_b: int) -> float:
    """z-score: the log odds ratio of `a` in `of_a` texts to `b` in `of_b`, in standard errors.

    A half is added to each cell (Haldane 1956), so that no cell is 0.
    """
    cells = [a + 0.5, of_a - a + 0.5, b + 0.5, of_b - b + 0.5]
    return (math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])) / math.sqrt(
        sum(1 / cell for cell in cells)
    )
