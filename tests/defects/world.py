"""A small world in which every part of the pipeline can succeed: what it is like, a 2-layer model
learns in seconds.

A response is good, fair or bad by its adjective, and "never once" turns it round: who counts words,
or their pairs, cannot tell. The judge, a lexicon, can for the most part. Lengths, endings and all
other words say nothing.
"""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

from stages.assets.datasets import ENDS, MANNERS, OPENINGS, PLACES

LEVELS = (
    ("wonderful", "great", "lovely", "happy"),
    ("nice", "calm", "usual"),
    ("awful", "sad", "dull", "terrible"),
)
GOOD, FAIR, BAD = range(3)
Rows = list[dict[str, Any]]
World = dict[str, Rows]


def response(generator: random.Random, level: int) -> str:
    never = generator.random() < 0.35
    adjective = generator.choice(LEVELS[BAD - level if never else level])
    manner, end = generator.choice(MANNERS), generator.choice(list(ENDS))
    return f" {'never once ' if never else ''}{manner} {adjective} {end}."


def pairs(generator: random.Random, prompts: Sequence[str], per_prompt: int) -> Rows:
    levels = (sorted(generator.sample(range(3), 2)) for _ in range(len(prompts) * per_prompt))
    repeated_prompts = (prompt for prompt in prompts for _ in range(per_prompt))
    return [
        {
            "prompt": prompt,
            "chosen": response(generator, better),
            "rejected": response(generator, worse),
        }
        for prompt, (better, worse) in zip(repeated_prompts, levels, strict=True)
    ]


def demonstrations(generator: random.Random, prompts: Sequence[str], per_prompt: int) -> Rows:
    return [
        {
            "prompt": p,
            "completion": response(generator, generator.choice((GOOD, GOOD, GOOD, FAIR, BAD))),
        }
        for p in prompts
        for _ in range(per_prompt)
    ]


def world() -> World:
    """Sources by file name; those of `eval` share no prompt with those of `train`."""
    generator = random.Random(0)
    prompts = [f"{opening} {location}" for opening, location in product(OPENINGS, PLACES)]
    generator.shuffle(prompts)
    held_out, train = prompts[:40], prompts[40:]
    return {
        "train_pairs.jsonl": pairs(generator, train, 4),
        "train_texts.jsonl": demonstrations(generator, train, 3),
        "eval_pairs.jsonl": pairs(generator, held_out, 4),
        "eval_texts.jsonl": demonstrations(generator, held_out, 2),
    }
