"""Sampling from a causal LM, and the log-probabilities and scores of what was sampled.

Dimensions: B sequences, T response tokens of one, N of all, M prompt and response tokens of all, V
vocabulary, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.lora import cached_adapter_weights
from stages.lib.lm.packing import model_autocast, pack, prefill, unwrap_peft

COMPACT_BELOW = 0.75  # share of a batch still being sampled, at which the others leave it


@torch.no_grad()
def generate(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    *,
    response_length: int,
    temperature: float,
    generator: torch.Generator,
    batch_size: int,
    eos_token_id: int,
) -> list[TokenIds]:
    """Sample one response a prompt; EOS is kept where it was sampled.

    One uniform number a row and token is drawn first and turned into a token by inverse CDF: this
    is far faster than torch.multinomial on a CPU, and two models given the same generator state see
    the same random numbers.
    """
    uniforms = torch.rand(len(prompt_ids), response_length, generator=generator)
    responses: list[TokenIds] = []
    with cached_adapter_weights(model), model_autocast(model):
        for start in range(0, len(prompt_ids), batch_size):
            rows = slice(start, start + batch_size)
            responses += _generate_batch(
                unwrap_peft(model), prompt_ids[rows], uniforms[rows], temperature, eos_token_id
            )
    return responses


def sample_responses(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[TokenIds],
    ppo: PpoParams,
    generator: torch.Generator,
    batch_size: int,
) -> list[TokenIds]:
    """One response a prompt, as PPO samples them: `generate` with its length and temperature."""
    return generate(
        model,
        prompt_ids,
        response_length=ppo.response_length,
        temperature=ppo.temperature,
        generator=generator,
        batch_size=batch_size,
        eos_token_id=tokenizer.eos_token_id,
    )


def _generate_batch(
    model: Any, prompt_ids: Sequence[TokenIds], uniforms: Tensor, temperature: float, eos: int
) -> list[TokenIds]:
    device, head = model.device, model.get_output_embeddings()
    prompts = pack(prompt_ids, [[] for _ in prompt_ids], device)
    mask = prompts.pad(torch.ones_like(prompts.input_ids))  # of what the cache holds
    positions, uniforms = mask.sum(1, keepdim=True), uniforms.to(device)
    sampled = torch.full(uniforms.shape, eos, device=device)
    rows = torch.arange(len(prompt_ids), device=device)  # those still in the batch
    going = torch.ones_like(rows, dtype=torch.bool)
    states, cache = prefill(model, prompts)
    for step in range(uniforms.shape[1]):
        # (B, H), not logits_to_keep's (B, 1, H) view: that one is multiplied row by row, each time
        # with a copy of the vocabulary
        token = _draw(head(states).float(), temperature, uniforms[rows, step]).masked_fill(
            ~going, eos
        )
        sampled[rows, step] = token
        going = going & (token != eos)
        left = int(going.sum())
        if not left or step == uniforms.shape[1] - 1:
            break
        if left <= COMPACT_BELOW * len(
            rows
        ):  # rows that have ended leave, now and then, since it costs a copy of the cache
            cache.batch_select_indices(going.nonzero().squeeze(1))
            rows, token, positions, mask, going = (
                each[going] for each in (rows, token, positions, mask, going)
            )
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        states = model.base_model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        positions = positions + 1
    return [_until_eos(row, eos) for row in sampled.tolist()]


def _draw(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """(B,) tokens of (B, V) float32 logits, which are overwritten, by inverse CDF of (B,) uniforms."""
    if temperature != 1:
        logits /= temperature
    cumulative = logits.sub_(logits.amax(-1, keepdim=True)).exp_().cumsum_(-1)
    token = torch.searchsorted(
        cumulative, uniforms[:, None] * cumulative[:, -1:], right=True
    ).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


def _until_eos(tokens: TokenIds, eos: int) -> TokenIds:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
