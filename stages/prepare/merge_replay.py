"""Add the previous round's replay to this round's training sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from stages.lib.core.files import is_placeholder, maker
from stages.lib.core.rows import Demonstration, PreferencePair, TrainingPrompt, read_rows
from stages.lib.data.splits import DataSets, check_not_in_eval_set, prompt_key
from stages.lib.dedup.contamination import check_no_leaks, find_leaks


def merge_replay(
    train: DataSets, held_out: DataSets, previous: Path, max_share: float, similarity: float
) -> DataSets:
    """The previous round's replayed rows that are added to the training sets.

    Args:
        train: this round's rows by file name without suffix (sft, pairs, prompts).
        held_out: the evaluation rows, likewise.
        previous: folder of the previous round.
        max_share: of replayed rows in each merged set, 0 to 1.
        similarity: prepare.near_duplicate.

    Returns:
        The rows to add to each set. Prompts have the columns that the data have for them.

    Raises:
        BadInput: a replayed row has an evaluation prompt, or leaks a held-out text
            (stages/lib/dedup/contamination.py).
    """
    folder = previous / "replay/data"
    if is_placeholder(folder):
        return dict.fromkeys(train, ())
    replayed: DataSets = {
        "sft": read_rows(Demonstration, folder / "sft.jsonl"),
        "pairs": read_rows(PreferencePair, folder / "pairs.jsonl"),
        "prompts": with_columns(
            read_rows(TrainingPrompt, folder / "prompts.jsonl"),
            cast(Sequence[TrainingPrompt], train["prompts"]),
        ),
    }

    # All rows are checked, also those beyond max_share: replay must never produce such rows.
    rows = [row for name in replayed for row in replayed[name]]
    locations = [
        f"{folder / name}.jsonl:{line}"
        for name in replayed
        for line in range(1, len(replayed[name]) + 1)
    ]
    check_not_in_eval_set(
        (
            (f"{location}: its prompt", row["prompt"])
            for location, row in zip(locations, rows, strict=True)
        ),
        held_out["prompts"],
        f"if seed or data changed since {previous.name}, `rondo run --rerun all` makes all rounds "
        "again; else remove the row",
    )
    held_out_rows = [row for name in held_out for row in held_out[name]]
    leaks = find_leaks(rows, held_out_rows, similarity)
    check_no_leaks(
        [(locations[leak.row], leak) for leak in leaks],
        f"run `{maker(folder)}` again, which drops such rows, or remove them",
    )

    if max_share == 1:
        return replayed
    # the largest number with added / (own rows + added) <= max_share
    most = {name: int(max_share * len(rows) / (1 - max_share)) for name, rows in train.items()}
    return {name: rows[: most[name]] for name, rows in replayed.items()}


def with_columns(
    replayed: Sequence[TrainingPrompt], own: Sequence[TrainingPrompt]
) -> list[TrainingPrompt]:
    """Give replayed prompts the further columns (`prepare.columns`) of the data's same prompts.

    Without them, a reward that needs e.g. the exact answer would fail.
    """
    columns = {prompt_key(row["prompt"]): row["columns"] for row in own if "columns" in row}
    return [
        {**row, "columns": columns[key]} if (key := prompt_key(row["prompt"])) in columns else row
        for row in replayed
    ]
