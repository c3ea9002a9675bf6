"""Flips: how often an edit that keeps the meaning changes which text of a pair scores higher."""

import random
from collections.abc import Sequence

from stages.battery.edits import EDITS
from stages.battery.metrics import Rate, highest_rate, rate, win
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import Edit
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Metrics, ScoreFunction


def flip_metrics(
    pairs: Sequence[PreferencePair],
    chosen: Sequence[float],
    rejected: Sequence[float],
    score: ScoreFunction,
    params: Params,
) -> Metrics:
    """For each edit of both texts, the share of correctly ranked pairs that it ranks wrongly.

    Args:
        pairs: P pairs.
        chosen: (P,) scores of the chosen texts.
        rejected: (P,) scores of the rejected texts.
        score: the reward model.
        params: all params; the edits are `battery.edits`.
    """
    correct = [row for row, a, b in zip(pairs, chosen, rejected, strict=True) if a > b]
    edits = params.battery.edits
    flips = {edit.value: flip_rate(correct, edit, score, params.seed) for edit in edits}
    return {"flips": flips, "worst_flip": highest_rate(flips.values())}


def flip_rate(pairs: Sequence[PreferencePair], edit: Edit, score: ScoreFunction, seed: int) -> Rate:
    """Of pairs that are ranked correctly; pairs whose texts stay the same are left out."""
    changed = [
        (row["prompt"], *texts)
        for row in pairs
        if (texts := edited(row, edit, seed)) != (row["chosen"], row["rejected"])
    ]
    prompts = [prompt for prompt, _, _ in changed]
    chosen = score(prompts, [text for _, text, _ in changed])
    rejected = score(prompts, [text for _, _, text in changed])
    scores = zip(chosen, rejected, strict=True)
    return rate([win(worse, better) for better, worse in scores], "rate", "pairs")


def edited(row: PreferencePair, edit: Edit, seed: int) -> tuple[str, str]:
    """Chosen and rejected text; a text is always edited in the same way."""
    chosen, rejected = (
        EDITS[edit](row[side], random.Random(f"{seed} {row[side]}")) for side in SIDES
    )
    return chosen, rejected
