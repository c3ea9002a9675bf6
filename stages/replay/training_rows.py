"""The next round's rows against badcases: pairs, demonstrations and prompts. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.lib.core.params import Params
from stages.lib.core.rows import (
    Demonstration,
    PreferencePair,
    PromptRow,
    RevisedResponse,
    TrainingPrompt,
)
from stages.lib.data.splits import DataSets, prompt_key
from stages.lib.dedup.contamination import leaks_by_set
from stages.replay.badcases import Badcase, State

REVISED_SOURCE = "revision"  # `source` of demonstrations that a language model revised


@dataclass(frozen=True)
class BetterAnswer:
    """The jury's best answer to a badcase's prompt.

    preferred: whether it also beats the bad response, and the cause gives pairs. good: whether it
    is worth imitating.
    """

    text: str
    preferred: bool
    good: bool


def make_training_rows(
    badcases: Sequence[Badcase], best: Mapping[str, BetterAnswer]
) -> tuple[list[Badcase], list[PreferencePair], list[Demonstration], list[TrainingPrompt]]:
    """Make rows that train against the badcases.

    A pair is made if the jury prefers the better answer to the bad response without its exploits;
    if a person gave the better answer, always. A demonstration is made if the better answer is good
    in itself. The prompt is sampled by PPO again in any case.

    Args:
        best: by badcase id.

    Returns:
        (the badcases as replayed, with their better answers; pairs; demonstrations; prompts)
    """
    replayed: list[Badcase] = []
    pairs: list[PreferencePair] = []
    demonstrations: dict[tuple[str, str], Demonstration] = {}
    prompts: dict[str, TrainingPrompt] = {}
    for case in badcases:
        key, row_id = str(case.prompt), f"replay-{case.id}"
        row: TrainingPrompt = {
            "id": row_id,
            "prompt": case.prompt,
            "source": "replay",
            "badcase": case.id,
        }
        prompts.setdefault(key, row)
        answer = best.get(case.id)
        better = case.better or (answer.text if answer and answer.preferred else None)
        demonstrated = case.better or (answer.text if answer and answer.good else None)
        if better:
            pairs.append(
                {
                    "id": row_id,
                    "prompt": case.prompt,
                    "source": "replay",
                    "badcase": case.id,
                    "chosen": better,
                    "rejected": case.response,
                }
            )
        if demonstrated:
            demonstrations.setdefault((key, demonstrated), {**row, "completion": demonstrated})
        replayed.append(case.model_copy(update={"better": better, "state": State.replayed}))
    return replayed, pairs, list(demonstrations.values()), list(prompts.values())


def demonstrations_of(revised: Sequence[RevisedResponse], round_: str) -> list[Demonstration]:
    """The revised responses of a round as demonstrations.

    `badcase` marks them as made by the pipeline, so that they never count as rows of people.
    """
    return [
        {
            "id": f"revised-{round_}-{row['id']}",
            "prompt": row["prompt"],
            "source": REVISED_SOURCE,
            "badcase": f"revised-{round_}-{row['id']}",
            "completion": row["revision"],
        }
        for row in revised
    ]


def add_earlier(made: DataSets, earlier: DataSets) -> DataSets:
    """The new rows, then those that replay made in earlier rounds, each text once.

    So the next round trains on the rows of all rounds (Wolf et al. 2025, arXiv 2505.18126), and a
    prompt that fails in each round does not become more and more frequent.
    """
    merged: dict[str, Sequence[PromptRow]] = {}
    for name, rows in made.items():
        by_texts: dict[tuple[object, ...], PromptRow] = {}
        for row in [*rows, *earlier[name]]:
            texts = (row.get(key) for key in ("completion", "chosen", "rejected"))
            by_texts.setdefault((prompt_key(row["prompt"]), *texts), row)
        merged[name] = [*by_texts.values()]
    return merged


def limit_rows(
    made: DataSets, evaluation: DataSets, human: Mapping[str, int], params: Params
) -> tuple[DataSets, int]:
    """The rows without leaks, each replay.weight times, at most replay.max_share of the training
    rows: if there is no room for all, the first ones.

    human: the number of rows from the data, by the names of `made`. Returns also the number of
    leaks.
    """
    config = params.replay
    kept, leaked = drop_leaks(made, evaluation, params.prepare.near_duplicate)
    limited: DataSets = {
        name: cap_share(
            [row for row in rows for _ in range(config.weight)], human[name], config.max_share
        )
        for name, rows in kept.items()
    }
    return limited, leaked


def drop_leaks(made: DataSets, evaluation: DataSets, similarity: float) -> tuple[DataSets, int]:
    """Rows that share no text with the evaluation set, and the number of dropped rows.

    The next round's prepare would refuse rows that leak.
    """
    held_out = [row for rows in evaluation.values() for row in rows]
    leaking = {
        name: {leak.row for leak in leaks}
        for name, leaks in leaks_by_set(made, held_out, similarity).items()
    }
    kept: DataSets = {
        name: [row for index, row in enumerate(rows) if index not in leaking[name]]
        for name, rows in made.items()
    }
    return kept, sum(map(len, leaking.values()))


def cap_share(rows: list[PromptRow], human: int, share: float) -> list[PromptRow]:
    """The first rows, at most so many that they are `share` of all, with `human` other rows."""
    return rows if share >= 1 else rows[: int(human * share / (1 - share))]
