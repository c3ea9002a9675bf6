"""Training and held-out sets: their file names, how rows are held out, and checks for overlap.

In order: the names of the sets; drawing a held-out set; comparing prompts of two sets; checks that
no training prompt is held out and that the held-out files do not change; small helpers for rows.
Overlap of other texts than prompts is the subject of stages/lib/dedup/contamination.py.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from stages.lib.core.errors import BadInput
from stages.lib.core.files import is_placeholder, stage_dir
from stages.lib.core.rows import Demonstration, HasPrompt, PromptRow, read_rows
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import as_text

# Names of the sets by kind: demonstrations, preference pairs, prompts
TRAIN = {"sft": "sft_train", "pairs": "pairs_train", "prompts": "prompts_train"}
HELD_OUT = {"prompts": "eval_prompts", "sft": "sft_eval", "pairs": "pairs_eval"}
DataSets = dict[str, Sequence[PromptRow]]
CALIBRATION_ROWS = 256  # demonstrations whose scores define the unit of a reward model
EVAL_FILES = tuple(f"{name}.jsonl" for name in HELD_OUT.values())

AnyPromptRow = TypeVar("AnyPromptRow", bound=HasPrompt)


def hold_out(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """Draw the groups that are held out.

    Rows of one group, e.g. with near-duplicate prompts, are held out together: else a training row
    would be almost the same as a held-out row.

    Args:
        groups: the group of each row; order and repetition do not matter.
        share: share of the distinct groups to hold out; more than 0, less than 1 (not checked).
        seed: seed of the draw.

    Returns:
        The groups held out: `share` of them, rounded, and at least one. Empty if there are none.

    Example:
        >>> held_out = hold_out(["a", "b", "b", "c", "d"], share=0.5, seed=0)
        >>> len(held_out), held_out <= {"a", "b", "c", "d"}
        (2, True)
    """
    # Sorted first, so that the draw depends on the set of groups only, not on the rows' order
    distinct = sorted(set(groups))
    random.Random(seed).shuffle(distinct)
    return set(distinct[: max(round(share * len(distinct)), 1)])


def prompt_key(prompt: Prompt) -> str:
    """The prompt as one line of text, with case and white space normalised."""
    return " ".join(as_text(prompt).casefold().split())


class PromptIndex:
    """A set of prompts with a fast search for prompts that begin with a given one."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.keys = sorted({prompt_key(prompt) for prompt in prompts})

    def has_start(self, prompt: Prompt) -> bool:
        """Whether `prompt` equals one of these prompts, or is a start of one that ends a word."""
        key = prompt_key(prompt)
        # Control characters sort before the space, so a key that continues with a space need not
        # come right after `key`: search for it too.
        for start in (key, key + " "):
            index = bisect_left(self.keys, start)
            if index < len(self.keys) and (
                self.keys[index] == key or self.keys[index].startswith(key + " ")
            ):
                return True
        return False


def check_not_in_eval_set(
    prompts: Iterable[tuple[str, Prompt]], evaluation: Iterable[PromptRow], next_step: str
) -> None:
    """Check that no prompt is in the frozen evaluation set.

    Args:
        prompts: prompts that training rows would be made from, each with its name for messages.
        evaluation: rows of the evaluation set, with `id` and `prompt`.
        next_step: what the user should do, for messages.
    """
    frozen = {prompt_key(row["prompt"]): row["id"] for row in evaluation}
    for name, prompt in prompts:
        if row_id := frozen.get(prompt_key(prompt)):
            raise BadInput(
                f"{name} is evaluation prompt {row_id}, which no round may train on; {next_step}"
            )


def check_prompts_not_in_eval_set(
    rows: Sequence[PromptRow], evaluation: Sequence[PromptRow]
) -> None:
    """Check that no row of `rows` has a prompt of the frozen evaluation set."""
    check_not_in_eval_set(
        ((f"training prompt {row['id']}", row["prompt"]) for row in rows),
        evaluation,
        "run `dvc repro prepare` again",
    )


def check_eval_set_unchanged(folder: Path, previous: Path) -> None:
    """Check that the held-out files equal those of the previous round.

    Raises:
        BadInput: a held-out file differs, or the previous round has none.
    """
    before = previous / "prepare/data"
    if is_placeholder(before):
        return
    for name in EVAL_FILES:
        if not (before / name).exists():
            raise BadInput(f"{before / name} is missing: run `dvc repro prepare@{previous.name}`")
        if (before / name).read_bytes() != (folder / name).read_bytes():
            raise BadInput(
                f"{folder / name} differs from {before / name}: the evaluation set is frozen after "
                "the first round. Undo the change of seed, assets or prepare.*, or start again "
                "with `dvc repro prepare@r0`"
            )


def evaluation_hash(folder: Path) -> str:
    """sha256 of the concatenated held-out files."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in EVAL_FILES)).hexdigest()


def dedupe_prompts(rows: list[AnyPromptRow]) -> list[AnyPromptRow]:
    """One row per distinct prompt, the first one; replayed prompts occur more than once.

    Prompts are the same if they differ only in case or white space. The rows are ordered by the
    last occurrence of their prompt, from the end.
    """
    return list({prompt_key(row["prompt"]): row for row in reversed(rows)}.values())


def calibration_demonstrations(round_: str, seed: int) -> list[Demonstration]:
    """The demonstrations whose scores define the unit of a reward model, at most CALIBRATION_ROWS.

    They are held out: no model was trained on them, and they are the same in every round, so that
    the unit of the scores is. They are drawn at random: in a file, several sources follow each
    other. [] if the data have no demonstrations.
    """
    rows = read_rows(Demonstration, stage_dir(round_, "prepare") / "data/sft_eval.jsonl")
    return shuffled(rows, seed)[:CALIBRATION_ROWS]


def shuffled(rows: list[AnyPromptRow], seed: int) -> list[AnyPromptRow]:
    """All rows in random order."""
    return random.Random(seed).sample(rows, len(rows))
