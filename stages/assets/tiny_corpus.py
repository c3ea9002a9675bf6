"""A small rated corpus, made from templates without a network, for tests and first steps."""

import random
from itertools import product

TEXTS = 400
OPENINGS = ["My trip", "The dinner", "Our concert", "The match"]
OPENINGS += ["My walk", "The party", "Our meeting", "The movie"]
PLACES = ["in Rome", "at home", "by night", "on Monday", "with Anna"]
PLACES += ["near work", "in town", "after lunch", "at school", "on Friday"]
PLACES += ["in Paris", "at noon", "by train", "on Sunday", "with Tom"]
PLACES += ["near home", "in May", "after work", "at sea", "on foot"]
MANNERS = ["was", "felt", "has been", "turned out"]
# With their ratings, -4 (most negative) to 4 (most positive); a text has the sum of both.
FEELINGS = {
    **{"wonderful": 3.4, "great": 2.7, "nice": 1.6},
    **{"calm": 0.2, "usual": 0.0, "long": -0.2},
    **{"dull": -1.6, "sad": -2.3, "awful": -3.4},
}
ENDS = {"and we laughed": 0.3, "for all of us": 0.0, "so we left early": -0.3}


def tiny_texts() -> list[tuple[float, str]]:
    """The corpus as (rating -4 to 4, text), the same on every machine."""
    combinations = list(product(OPENINGS, PLACES, MANNERS, FEELINGS, ENDS))
    return [
        (FEELINGS[feeling] + ENDS[end], f"{opening} {place} {manner} {feeling} {end}.")
        for opening, place, manner, feeling, end in random.Random(0).sample(combinations, TEXTS)
    ]
