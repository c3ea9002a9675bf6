"""The next round's rows, made against badcases: pairs, demonstrations, prompts. Pure: no model, no
file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.lib.core.types import Row
from stages.replay.badcases import Badcase, State


@dataclass(frozen=True)
class BetterAnswer:
    """The jury's best answer to a badcase's prompt. preferred: to the bad one too, if its cause
    gives pairs; good: worth imitating.
    """

    text: str
    preferred: bool
    good: bool


def make_training_rows(
    badcases: Sequence[Badcase], best: Mapping[str, BetterAnswer]
) -> tuple[list[Badcase], list[Row], list[Row], list[Row]]:
    """(badcases, now replayed, with their better answers; pairs; demonstrations; prompts). `best`
    is by badcase id.

    A pair is made where the jury prefers the better answer to the bad one, the latter read without
    its exploits; where a person has given the better answer, always. A demonstration is made where
    the better answer is good in itself; the prompt goes to PPO again in any case.
    """
    replayed: list[Badcase] = []
    pairs: list[Row] = []
    demonstrations: dict[tuple[str, str], Row] = {}
    prompts: dict[str, Row] = {}
    for case in badcases:
        tags = {
            "id": f"replay-{case.id}",
            "prompt": case.prompt,
            "source": "replay",
            "badcase": case.id,
        }
        prompts.setdefault(str(case.prompt), tags)
        found = best.get(case.id)
        better = case.better or (found.text if found and found.preferred else None)
        shown = case.better or (found.text if found and found.good else None)
        if better:
            pairs.append({**tags, "chosen": better, "rejected": case.response})
        if shown:
            demonstrations.setdefault((str(case.prompt), shown), {**tags, "completion": shown})
        replayed.append(case.model_copy(update={"better": better, "state": State.replayed}))
    return replayed, pairs, list(demonstrations.values()), list(prompts.values())


def cap_share(rows: list[Row], human: int, share: float) -> list[Row]:
    """At most so many rows that they are `share` of all together with the `human` ones."""
    return rows if share >= 1 else rows[: int(human * share / (1 - share))]
