"""Hard negatives: pairs that need no human label, made from the training pairs.

The chosen text is paired with a corrupted copy of itself, or with the rejected text plus the ending
of a good text, an emoji or a word that goes with good texts. A reward model trained on whole
sentences alone has never seen such texts, and a policy finds them first. The battery stage tests
the same kinds on held-out texts.
"""

import random
from collections.abc import Sequence

from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.data.corruptions import corruptions, word_score_uplift
from stages.lib.metrics.text import suffixes

# Used in turn, so that their shares do not depend on chance. Repeated kinds get a larger share.
KINDS = (
    *("bought_word", "word_salad", "decorated", "bought_word", "repeated_word", "borrowed_ending"),
    *("bought_word", "truncated", "decorated", "bought_word", "empty"),
)
# Human labels do not show what decorations are worth, so the model must learn to ignore them.
SMILEYS = [chr(code) for code in range(0x1F600, 0x1F640)]
SIGNS = [":)", ":D", ";)", "<3", "!!!"]
UPLIFTING_WORDS = 100  # of `bought_word`: the words with the highest uplift


def hard_negatives(
    pairs: Sequence[PreferencePair], share: float, seed: int
) -> list[PreferencePair]:
    """Draw a share of the pairs at random and give each chosen text a worse rejected text.

    Args:
        pairs: training pairs: id, prompt, chosen, rejected.
        share: of the pairs, 0 to 1.
        seed: of the draw and the corruptions.

    Returns:
        Rows with the id `<id>-<kind>`, with kinds in turn. A kind that leaves the text equal to the
        chosen or the rejected one gives no row.
    """
    generator = random.Random(seed)
    drawn = generator.sample(pairs, round(share * len(pairs)))
    if not drawn:
        return []
    texts = [row[side] for row in pairs for side in SIDES]
    uplift = word_score_uplift(texts, [1.0, 0.0] * len(pairs))
    positive_words = (word for word in uplift if uplift[word] > 0 and word[0].isalpha())
    bought_words = sorted(positive_words, key=lambda word: (-uplift[word], word))[:UPLIFTING_WORDS]
    corrupted = corruptions([(row["prompt"], row["chosen"]) for row in drawn], uplift, seed)
    rows: list[PreferencePair] = []
    for number, row in enumerate(drawn):
        kind = KINDS[number % len(KINDS)]
        if kind == "borrowed_ending":
            endings = suffixes(generator.choice(pairs)["chosen"]) or [""]
            rejected = row["rejected"] + generator.choice(endings)
        elif kind == "bought_word":
            word = generator.choice(bought_words) if bought_words else ""
            rejected = row["rejected"] + (as_sentence(word, generator) if word else "")
        elif kind == "decorated":
            rejected = row["rejected"] + " " + generator.choice(generator.choice((SMILEYS, SIGNS)))
        else:
            rejected = corrupted[kind][number][1]
        if rejected not in (row["chosen"], row["rejected"]):
            negative_id = f"{row['id']}-{kind}"
            negative: PreferencePair = {**row, "id": negative_id, "rejected": rejected}
            rows.append({**negative, "source": "hard_negative"})
    return rows


def as_sentence(word: str, generator: random.Random) -> str:
    """The word as a sentence of its own, or as the last word of a sentence."""
    return generator.choice(
        (f" {word}", f" {word}.", f" {word.capitalize()}.", f" {word.capitalize()}!")
    )
