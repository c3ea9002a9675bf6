"""Training prompts that responses are drawn to, of which training rows are made."""

import random

from stages.lib.core.files import Row
from stages.lib.data.splits import refuse_frozen


def once(rows: list[Row]) -> list[Row]:
    """The rows of distinct prompts: replayed prompts are there twice."""
    return list({str(row["prompt"]): row for row in reversed(rows)}.values())


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    return random.Random(seed).sample(rows, len(rows))


def refuse_evaluation_prompts(rows: list[Row], evaluation: list[Row]) -> None:
    """
    Raises:
        BadInput: a prompt that rows would be made of is in the frozen evaluation set.
    """
    refuse_frozen(
        ((f"training prompt {row['id']}", row["prompt"]) for row in rows),
        evaluation,
        "run `dvc repro prepare` again",
    )
