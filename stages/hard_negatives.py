"""Pairs that no person has to label: a text against itself, broken, and against a worse one that borrows a good one's ending.

A reward model that has learnt from whole sentences alone has never seen the texts that a policy finds first. What the battery tries on
held-out texts it learns here from training texts; the endings that the battery tries are its own.
"""

import random
from collections.abc import Sequence

from stages.corruptions import corruptions, word_worth
from stages.records import Row
from stages.text import suffixes

KINDS = ("borrowed_ending", "word_salad", "borrowed_ending", "repeated_word", "truncated", "empty")  # in turn


def hard_negatives(pairs: Sequence[Row], share: float, seed: int) -> list[Row]:
    """`share` of the pairs at random, the chosen text against a worse one, by kinds in turn; without those that stay as they are."""
    generator = random.Random(seed)
    drawn = generator.sample(pairs, round(share * len(pairs)))
    texts, labels = [row[side] for row in pairs for side in ("chosen", "rejected")], [1.0, 0.0] * len(pairs)
    broken = corruptions([(row["prompt"], row["chosen"]) for row in drawn], word_worth(texts, labels), seed) if drawn else {}
    rows = []
    for number, row in enumerate(drawn):
        kind = KINDS[number % len(KINDS)]
        if kind == "borrowed_ending":
            rejected = row["rejected"] + generator.choice(suffixes(generator.choice(pairs)["chosen"]) or [""])
        else:
            rejected = broken[kind][number][1]
        if rejected not in (row["chosen"], row["rejected"]):
            rows.append({**row, "id": f"{row['id']}-{kind}", "rejected": rejected, "source": "hard_negative"})
    return rows
