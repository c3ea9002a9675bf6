"""The prompts of a round that the policy learns from, and those held out to compare policies on."""

from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import Row, TokenIds
from stages.lib.data.prompts import encode
from stages.lib.data.splits import hold_out, prompt_key

Episode = tuple[Row, TokenIds]  # a prompt's row, and its tokens


def make_episodes(
    rows: list[Row], tokenizer: Any, params: Params
) -> tuple[list[Episode], list[Episode]]:
    """The prompts to train on and those held out, with their tokens."""

    def tokens(row: Row) -> TokenIds:
        return encode(
            tokenizer,
            row["prompt"],
            None,
            params.prepare.prompt_format,
            params.prepare.max_prompt_tokens,
        )[0]

    train, held_out = ([(row, tokens(row)) for row in part] for part in split(rows, params))
    return train, held_out


def split(rows: list[Row], params: Params) -> tuple[list[Row], list[Row]]:
    """Prompts to train on, and `validation_prompts` others.

    Raises:
        BadInput: too few are left for a batch.
    """
    number, least = params.ppo.validation_prompts, params.ppo.batch_size
    keys = {prompt_key(row["prompt"]): row for row in rows}
    held_out = hold_out(keys, number / max(len(keys), 1), params.seed)
    train = [row for row in rows if prompt_key(row["prompt"]) not in held_out]
    if len(train) < least:
        raise BadInput(
            f"{len(keys)} PPO prompts less ppo.validation_prompts ({number}) are fewer than ppo.batch_size ({least}): "
            "lower one of them, or add prompts"
        )
    return train, [row for key, row in keys.items() if key in held_out]


def planned_updates(params: PpoParams) -> int:
    updates = max(params.total_episodes // params.batch_size, 1)
    return min(updates, params.max_steps) if params.max_steps else updates
