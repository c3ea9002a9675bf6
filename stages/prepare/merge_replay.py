"""The previous round's replay, into this round's training files."""

from pathlib import Path

from stages.lib.core.files import is_placeholder, read_jsonl
from stages.lib.core.types import Row
from stages.lib.data.splits import check_not_in_eval_set
from stages.lib.dedup.contamination import check_no_leaks, find_leaks


def merge_replay(
    train: dict[str, list[Row]],
    held_out: dict[str, list[Row]],
    previous: Path,
    max_share: float,
    similarity: float,
) -> dict[str, int]:
    """Append the previous round's replay to the training files, to at most `max_share` of each;
    returns how many rows each got.

    Raises:
        BadInput: a replayed row's prompt is an evaluation prompt, or it has something of a held-out
            text (stages/lib/dedup/contamination.py).
    """
    folder = previous / "replay/data"
    if is_placeholder(folder):
        return dict.fromkeys(train, 0)
    made_by = f"dvc repro replay@{previous.name}"
    replayed = {name: read_jsonl(folder / f"{name}.jsonl", made_by) for name in train}
    placed = [
        (f"{folder / name}.jsonl:{line}", row)
        for name, some in replayed.items()
        for line, row in enumerate(some, 1)
    ]
    check_not_in_eval_set(
        ((f"{place}: its prompt", row["prompt"]) for place, row in placed),
        held_out["prompts"],
        "remove the row",
    )
    places, rows = [place for place, _ in placed], [row for _, row in placed]
    leaks = find_leaks(rows, [row for some in held_out.values() for row in some], similarity)
    check_no_leaks(
        [(places[leak.row], leak) for leak in leaks],
        f"run `{made_by}` again, which leaves such rows out, or remove them",
    )
    counts = {}
    for name, own in train.items():
        most = int(max_share * len(own) / (1 - max_share)) if max_share < 1 else len(replayed[name])
        own.extend(replayed[name][:most])
        counts[name] = len(replayed[name][:most])
    return counts
