"""Lengths in params.yaml against what the base model can read, checked before SFT starts."""

from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.lm.loading import load_config, resolve_attention


def check_model_lengths(path: Path, params: Params) -> None:
    """Check the longest texts of all stages against a model's positions and sliding window.

    Sampling keeps the pads of short prompts inside of the cache, where they use up a part of the
    window. So it would see other tokens than training if a text were longer than the window.

    Args:
        path: the model folder.
        params: all params.

    Raises:
        BadInput: there is no model; or names the keys whose tokens are more than the model has
            positions for, or more than its sliding window.
    """
    config = load_config(path).get_text_config()
    # EOS is appended to a response that was cut off
    rollout = params.prepare.max_prompt_tokens + params.ppo.response_length + 1
    sampled = {"prepare.max_prompt_tokens + ppo.response_length + 1": rollout}
    given = {"sft.max_length": params.sft.max_length, "reward.max_length": params.reward.max_length}

    positions = getattr(config, "max_position_embeddings", None)
    for keys, tokens in (sampled | given).items():
        if positions and tokens > positions:
            raise BadInput(
                f"{keys} is {tokens} tokens, but {path} (assets.model) has positions for "
                f"{positions}: lower it, or choose a model with a longer context"
            )
    if not (window := sliding_window(config)):
        return
    grouped = resolve_attention(params.model) == "grouped"
    for keys, tokens in (sampled | given if grouped else sampled).items():
        if tokens > window:
            other = " or set model.attn_implementation to sdpa," if keys in given else ""
            raise BadInput(
                f"{keys} is {tokens} tokens, but attention of {path} (assets.model) reaches back "
                f"{window} tokens (sliding_window in its config.json), and Rondo cannot sample or "
                f"train beyond that: lower it,{other} or choose a model with a longer window"
            )


def sliding_window(config: Any) -> int | None:
    """Tokens that layers with a sliding window reach back; None if no layer has one."""
    window: int | None = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    return window if layers is None or "sliding_attention" in layers else None
