"""The rows that replay reads."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.lib.core.files import REVISED, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.rows import (
    AnyRow,
    Demonstration,
    PreferencePair,
    PromptRow,
    RevisedResponse,
    RolloutRow,
    TrainingPrompt,
    read_rows,
)
from stages.lib.data.prompts import pairs_with_room_for_ending
from stages.lib.data.rollouts import read_rollouts
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import (
    HELD_OUT,
    TRAIN,
    DataSets,
    check_not_in_eval_set,
    check_prompts_not_in_eval_set,
    dedupe_prompts,
    prompt_key,
    shuffled,
)
from stages.replay.badcases import MiningPrompt, Report, read_user_rows


def read_user_reports(
    round_: str, evaluation: Sequence[PromptRow]
) -> tuple[list[Report], list[PromptRow]]:
    """Reports, and prompts to sample.

    Raises:
        BadInput: a row is neither, or its prompt is in the evaluation set or in slices/, which may
            not be trained on.
    """
    rows = read_user_rows(round_)
    prompts = [(f"{location}: its prompt", row.prompt) for location, row in rows]
    check_not_in_eval_set(prompts, evaluation, "remove the row")
    check_not_in_slices(prompts)
    reports = [row for _, row in rows if isinstance(row, Report)]
    mining = [row for _, row in rows if isinstance(row, MiningPrompt)]
    return reports, [{"id": row.id, "prompt": row.prompt} for row in mining]


MAX_HELD_OUT_PAIRS = 512


@dataclass(frozen=True)
class ReplayInputs:
    """Rows by kind.

    prompts: distinct training prompts. rollouts: those of `needed_rollouts`. human: the numbers of
    training rows from the data, by the names of replay's files. earlier: the training rows that
    replay made in earlier rounds, likewise. revised: responses that annotate revised by
    a constitution. evaluation: all held-out rows by file name. reports, mining_prompts: from
    people.
    """

    prompts: list[TrainingPrompt]
    rollouts: list[RolloutRow]
    train_pairs: list[PreferencePair]
    held_out_pairs: list[PreferencePair]
    human: dict[str, int]
    earlier: DataSets
    revised: list[RevisedResponse]
    evaluation: DataSets
    reports: list[Report]
    mining_prompts: list[PromptRow]

    def pairs_with_room(
        self, tokenizer: Any, params: Params
    ) -> tuple[list[PreferencePair], list[PreferencePair]]:
        """(human training pairs, held-out pairs) to whose texts an ending can be appended.

        The held-out pairs are a random sample of limited size.
        """
        train = pairs_with_room_for_ending(self.train_pairs, tokenizer, params)
        held_out = pairs_with_room_for_ending(self.held_out_pairs, tokenizer, params)
        human = [row for row in train if is_human(row)]
        return human, shuffled(held_out, params.seed)[:MAX_HELD_OUT_PAIRS]


def read_inputs(round_: str, per_prompt: int) -> ReplayInputs:
    """Read all rows.

    Raises:
        BadInput: a file is missing, or a prompt is an evaluation prompt: rows made from it would be
            trained on.
    """
    data = stage_dir(round_, "prepare") / "data"

    def read(kind: type[AnyRow], name: str) -> list[AnyRow]:
        return read_rows(kind, data / f"{name}.jsonl")

    train_pairs = read(PreferencePair, TRAIN["pairs"])
    train_prompts = read(TrainingPrompt, TRAIN["prompts"])
    train: Mapping[str, Sequence[TrainingPrompt]] = {
        "pairs": train_pairs,
        "sft": read(Demonstration, TRAIN["sft"]),
        "prompts": train_prompts,
    }
    prompts = dedupe_prompts(train_prompts)
    rollouts, rollout_prompts = needed_rollouts(
        read_rollouts(stage_dir(round_, "ppo") / "rollouts"), per_prompt
    )
    held_out_pairs = read(PreferencePair, HELD_OUT["pairs"])
    evaluation: DataSets = {
        HELD_OUT["prompts"]: read(PromptRow, HELD_OUT["prompts"]),
        HELD_OUT["sft"]: read(Demonstration, HELD_OUT["sft"]),
        HELD_OUT["pairs"]: held_out_pairs,
    }
    revised = read_rows(RevisedResponse, stage_dir(round_, "annotate") / REVISED)
    check_prompts_not_in_eval_set(
        [*prompts, *rollout_prompts, *revised], evaluation["eval_prompts"]
    )
    reports, mining_prompts = read_user_reports(round_, evaluation["eval_prompts"])
    return ReplayInputs(
        prompts=prompts,
        rollouts=rollouts,
        train_pairs=train_pairs,
        held_out_pairs=held_out_pairs,
        human={name: sum(map(is_human, rows)) for name, rows in train.items()},
        earlier={name: [row for row in rows if not is_human(row)] for name, rows in train.items()},
        revised=revised,
        evaluation=evaluation,
        reports=reports,
        mining_prompts=mining_prompts,
    )


def is_human(row: TrainingPrompt) -> bool:
    """Whether a training row is from the data, not made by replay in an earlier round."""
    return "badcase" not in row


def needed_rollouts(
    rollouts: Iterable[RolloutRow], per_prompt: int
) -> tuple[list[RolloutRow], list[RolloutRow]]:
    """The rollouts that replay uses, since all of a long run do not fit into memory.

    Args:
        rollouts: of all of PPO's updates.
        per_prompt: how many responses of PPO's updates `policy_pairs.finished_responses` takes.

    Returns:
        Those of the last third of the updates, and for each prompt the last `per_prompt` that
        ended, in their order; and the first one of each prompt.
    """
    first: dict[str, RolloutRow] = {}
    ended: dict[str, deque[tuple[int, RolloutRow]]] = {}
    late: deque[tuple[int, RolloutRow]] = deque()
    last = 0
    for numbered in enumerate(rollouts):
        _, row = numbered
        key, last = prompt_key(row["prompt"]), max(last, row["update"])
        first.setdefault(key, row)
        if row["update"] and row["finish_reason"] == "stop":
            ended.setdefault(key, deque(maxlen=per_prompt)).append(numbered)
        late.append(numbered)
        while late and late[0][1]["update"] <= 2 / 3 * last:
            late.popleft()
    kept = dict(late) | {number: row for rows in ended.values() for number, row in rows}
    return [kept[number] for number in sorted(kept)], list(first.values())


def last_third(rollouts: list[RolloutRow]) -> list[RolloutRow]:
    """The rollouts of the last third of the updates: close to the policy at the end of training."""
    last = max((row["update"] for row in rollouts), default=0)
    return [row for row in rollouts if row["update"] > 2 / 3 * last]
