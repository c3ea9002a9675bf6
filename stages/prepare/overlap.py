"""Overlap of training and held-out prompts in the users' own sources."""

from collections.abc import Collection

from stages.lib.core.errors import BadInput
from stages.lib.data.splits import PromptIndex, prompt_key
from stages.prepare.formats import SourceRow

SHOWN = 5  # pairs of rows in an error message


def overlapping(
    eval_rows: Collection[SourceRow], train_rows: Collection[SourceRow]
) -> list[tuple[SourceRow, SourceRow]]:
    """Find training rows whose prompt equals a held-out prompt or begins with one.

    Returns:
        Pairs (held-out row, training row).
    """
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


def check_no_prompt_overlap(
    eval_rows: Collection[SourceRow], train_rows: Collection[SourceRow]
) -> None:
    """Check that no training prompt equals a held-out prompt or begins with one.

    Raises:
        BadInput: there is such a training row; the message names the first ones.
    """
    if pairs := overlapping(eval_rows, train_rows):
        first = "\n".join(
            f"  held-out {held_out['where']} and training {train['where']}"
            for held_out, train in pairs[:SHOWN]
        )
        raise BadInput(
            f"{len(pairs)} training rows have the prompt of a held-out row or begin with it; "
            f"the first:\n{first}\nremove them from one of the sources"
        )
