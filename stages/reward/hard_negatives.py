"""Pairs that no person has to label: a text against itself, broken, and against a worse one with
the ending of a good one, or a smiley.

A reward model that has learnt from whole sentences alone has never seen the texts that a policy
finds first. What the battery tries on held-out texts it learns here from training texts.
"""

import random
from collections.abc import Sequence

from stages.lib.core.types import Row
from stages.lib.data.corruptions import corruptions, word_score_uplift
from stages.lib.metrics.text import suffixes

# in turn
KINDS = (
    *("bought_word", "word_salad", "decorated", "bought_word", "repeated_word", "borrowed_ending"),
    *("bought_word", "truncated", "decorated", "bought_word", "empty"),
)
SMILEYS, SIGNS = (
    [chr(code) for code in range(0x1F600, 0x1F640)],
    [":)", ":D", ";)", "<3", "!!!"],
)  # no label tells what they are worth
LOVED = 100  # words, those that go with chosen texts most, can be bought


def hard_negatives(pairs: Sequence[Row], share: float, seed: int) -> list[Row]:
    """`share` of the pairs at random, the chosen text against a worse one, by kinds in turn;
    without those that stay as they are.
    """
    generator = random.Random(seed)
    drawn = generator.sample(pairs, round(share * len(pairs)))
    if not drawn:
        return []
    texts, labels = (
        [row[side] for row in pairs for side in ("chosen", "rejected")],
        [1.0, 0.0] * len(pairs),
    )
    worth = word_score_uplift(texts, labels)
    loved = sorted(
        (word for word in worth if worth[word] > 0 and word[0].isalpha()),
        key=lambda word: (-worth[word], word),
    )[:LOVED]
    broken = corruptions([(row["prompt"], row["chosen"]) for row in drawn], worth, seed)
    rows = []
    for number, row in enumerate(drawn):
        kind = KINDS[number % len(KINDS)]
        if kind == "borrowed_ending":
            rejected = row["rejected"] + generator.choice(
                suffixes(generator.choice(pairs)["chosen"]) or [""]
            )
        elif kind == "bought_word":
            rejected = row["rejected"] + (
                as_sentence(generator.choice(loved), generator) if loved else ""
            )
        elif kind == "decorated":
            rejected = row["rejected"] + " " + generator.choice(generator.choice((SMILEYS, SIGNS)))
        else:
            rejected = broken[kind][number][1]
        if rejected not in (row["chosen"], row["rejected"]):
            rows.append(
                {
                    **row,
                    "id": f"{row['id']}-{kind}",
                    "rejected": rejected,
                    "source": "hard_negative",
                }
            )
    return rows


def as_sentence(word: str, generator: random.Random) -> str:
    """The word as a sentence of its own, or as the last one of a sentence."""
    return generator.choice(
        (f" {word}", f" {word}.", f" {word.capitalize()}.", f" {word.capitalize()}!")
    )
