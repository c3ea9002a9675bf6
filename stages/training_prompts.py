"""Training prompts that responses are drawn to, of which training rows are made."""

import random

from stages.errors import BadInput
from stages.prepare.split import prompt_key
from stages.records import Row


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
    frozen = {prompt_key(row["prompt"]): row["id"] for row in evaluation}
    for row in rows:
        if hit := frozen.get(prompt_key(row["prompt"])):
            raise BadInput(
                f"training prompt {row['id']} is evaluation prompt {hit}, which no round may train on; run `dvc repro prepare` again"
            )
