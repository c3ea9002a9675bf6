"""What is held out, and the checks that it stays so."""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Collection, Iterable
from pathlib import Path

from stages.lib.core.errors import BadInput
from stages.lib.core.files import is_placeholder
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import transcript

# the sets by what they are for: demonstrations, preference pairs, prompts
TRAIN = {"sft": "sft_train", "pairs": "pairs_train", "prompts": "prompts_train"}
HELD_OUT = {"prompts": "eval_prompts", "sft": "sft_eval", "pairs": "pairs_eval"}
EVAL_FILES = tuple(f"{name}.jsonl" for name in HELD_OUT.values())
SHOWN = 5


def prompt_key(prompt: Prompt) -> str:
    """The prompt as one line of text, case and white space aside."""
    text = prompt if isinstance(prompt, str) else transcript(prompt)
    return " ".join(text.casefold().split())


def hold_out(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """A random `share` of the distinct groups, at least one."""
    distinct = sorted(set(groups))
    random.Random(seed).shuffle(distinct)
    return set(distinct[: max(round(share * len(distinct)), 1)])


class PromptIndex:
    """A set of prompts that can be asked whether one begins like a given prompt."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.keys = sorted({prompt_key(prompt) for prompt in prompts})

    def has_start(self, prompt: Prompt) -> bool:
        """Whether `prompt` equals one of these, or is the beginning of one of these up to a word's
        end.
        """
        key = prompt_key(prompt)
        for start in (key, key + " "):
            at = bisect_left(self.keys, start)
            if at < len(self.keys) and (
                self.keys[at] == key or self.keys[at].startswith(key + " ")
            ):
                return True
        return False


def overlapping(eval_rows: Collection[Row], train_rows: Collection[Row]) -> list[tuple[Row, Row]]:
    """Pairs (held-out row, training row) where the first's prompt equals the second's or begins it."""
    train = PromptIndex(row["prompt"] for row in train_rows)
    leaked = {prompt_key(row["prompt"]): row for row in eval_rows if train.has_start(row["prompt"])}
    if not leaked:
        return []
    keyed = [(prompt_key(row["prompt"]), row) for row in train_rows]
    return [
        (row, other)
        for start, row in leaked.items()
        for key, other in keyed
        if key == start or key.startswith(start + " ")
    ]


def check_no_prompt_overlap(eval_rows: Collection[Row], train_rows: Collection[Row]) -> None:
    """
    Raises:
        BadInput: a held-out prompt equals a training prompt or begins it; names the rows.
    """
    if pairs := overlapping(eval_rows, train_rows):
        first = "\n".join(
            f"  held-out {held_out['where']} and training {train['where']}"
            for held_out, train in pairs[:SHOWN]
        )
        raise BadInput(
            f"{len(pairs)} training rows have a held-out row's prompt or go on from it; the first:\n{first}\n"
            f"remove them from one of the sources"
        )


def check_not_in_eval_set(
    asked: Iterable[tuple[str, Prompt]], evaluation: Iterable[Row], next_step: str
) -> None:
    """asked: prompts that rows would be made of, each with what a message calls it.

    Raises:
        BadInput: one is in the frozen evaluation set.
    """
    frozen = {prompt_key(row["prompt"]): row["id"] for row in evaluation}
    for said, prompt in asked:
        if hit := frozen.get(prompt_key(prompt)):
            raise BadInput(
                f"{said} is evaluation prompt {hit}, which no round may train on; {next_step}"
            )


def check_eval_set_unchanged(folder: Path, previous: Path) -> None:
    """
    Raises:
        BadInput: a held-out file differs from the previous round's.
    """
    before = previous / "prepare/data"
    if is_placeholder(before):
        return
    for name in EVAL_FILES:
        if not (before / name).exists():
            raise BadInput(f"{before / name} is missing: run `dvc repro prepare@{previous.name}`")
        if (before / name).read_bytes() != (folder / name).read_bytes():
            raise BadInput(
                f"{folder / name} differs from {before / name}: the evaluation set is frozen after the first round. "
                f"Undo the change of seed, assets or prepare.*, or start again with `dvc repro prepare@r0`"
            )


def evaluation_hash(folder: Path) -> str:
    """sha256 of the held-out files, one after the other."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in EVAL_FILES)).hexdigest()


def dedupe_prompts(rows: list[Row]) -> list[Row]:
    """The rows of distinct prompts: replayed prompts are there twice."""
    return list({str(row["prompt"]): row for row in reversed(rows)}.values())


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    return random.Random(seed).sample(rows, len(rows))


def refuse_evaluation_prompts(rows: list[Row], evaluation: list[Row]) -> None:
    """
    Raises:
        BadInput: a prompt that rows would be made of is in the frozen evaluation set.
    """
    check_not_in_eval_set(
        ((f"training prompt {row['id']}", row["prompt"]) for row in rows),
        evaluation,
        "run `dvc repro prepare` again",
    )
