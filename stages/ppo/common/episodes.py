"""The prompts of a round: those to train on, and those held out to compare policies on."""

from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.progress import tracked
from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import TokenIds
from stages.lib.data.prompts import encode
from stages.lib.data.splits import hold_out, prompt_key

Episode = tuple[TrainingPrompt, TokenIds]  # a prompt's row, and its tokens


def make_episodes(
    rows: list[TrainingPrompt], tokenizer: Any, params: Params
) -> tuple[list[Episode], list[Episode]]:
    """The prompts to train on and those held out, with their tokens."""
    prepare = params.prepare

    def tokens(row: TrainingPrompt) -> TokenIds:
        prompt_ids, _ = encode(
            tokenizer, row["prompt"], None, prepare.prompt_format, prepare.max_prompt_tokens
        )
        return prompt_ids

    train, held_out = (
        [(row, tokens(row)) for row in tracked("tokens of prompts", part, len(part))]
        for part in hold_out_prompts(rows, params)
    )
    return train, held_out


def hold_out_prompts(
    rows: list[TrainingPrompt], params: Params
) -> tuple[list[TrainingPrompt], list[TrainingPrompt]]:
    """Rows to train on, and `ppo.validation_prompts` others, which have no prompt in common.

    Raises:
        BadInput: fewer rows than one batch are left to train on.
    """
    number, batch_size = params.ppo.validation_prompts, params.ppo.batch_size
    # split by prompt, not by row, since replay repeats prompts
    keys = {prompt_key(row["prompt"]): row for row in rows}
    held_out = hold_out(keys, number / max(len(keys), 1), params.seed)
    train = [row for row in rows if prompt_key(row["prompt"]) not in held_out]
    if len(train) < batch_size:
        raise BadInput(
            f"{len(keys)} PPO prompts less ppo.validation_prompts ({number}) are fewer than "
            f"ppo.batch_size ({batch_size}): lower one of them, or add prompts"
        )
    return train, [row for key, row in keys.items() if key in held_out]


def planned_updates(params: PpoParams) -> int:
    """Number of updates in a run that no danger stops: `total_episodes`, at most `max_steps`."""
    updates = max(params.total_episodes // params.batch_size, 1)
    return min(updates, params.max_steps) if params.max_steps else updates
