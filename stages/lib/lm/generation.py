"""Sampling of responses from a causal language model.

Shapes: B sequences in a batch, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.progress import Pass, progress
from stages.lib.core.ram import trim_heap
from stages.lib.core.types import TokenIds
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.logprobs import head_logits
from stages.lib.lm.lora import cached_adapter_weights
from stages.lib.lm.packing import model_autocast, pack, prefill, unwrap_peft
from stages.lib.lm.world import whole_layers

COMPACT_BELOW = 0.75  # share of unfinished rows in a batch from which the finished ones are removed
# Keys and values of a batch: 512 MiB on a CPU, a quarter of the memory of another device
CPU_CACHE_BYTES, GPU_CACHE_SHARE = 1 << 29, 0.25


@torch.no_grad()
def generate(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    *,
    response_length: int,
    temperature: float,
    generator: torch.Generator,
    ends: EndTokens,
) -> list[TokenIds]:
    """Sample one response per prompt, without top-k or top-p, in batches that fit in memory.

    Several processes share the prompts (world.py).

    Args:
        model: a causal language model or a PeftModel.
        prompt_ids: tokens of each prompt.
        response_length: tokens per response at most.
        temperature: divides the logits.
        generator: source of random numbers, on the CPU.
        ends: the tokens that end a response.

    Returns:
        Tokens of each response, in the order of the prompts. An end token is kept if it was
        sampled.

    Example:
        responses = generate(
            model,
            [encode(tokenizer, "The dinner", None, PromptFormat.plain)[0]],
            response_length=24,
            temperature=1.0,
            generator=torch.Generator().manual_seed(0),
            ends=end_tokens(model, tokenizer),
        )
        [text] = decode(tokenizer, responses)
    """
    # All random numbers are drawn first, one per row and token, and become tokens by inverse CDF.
    # So responses do not depend on the batch size, two models with the same generator state see
    # the same numbers, and it is much faster than torch.multinomial on a CPU.
    uniforms = torch.rand(len(prompt_ids), response_length, generator=generator)
    longest = max(map(len, prompt_ids), default=0) + response_length
    batch_size = rows_per_batch(unwrap_peft(model), longest)
    own, responses = world.share(len(prompt_ids)), list[TokenIds]()
    tokens = len(own) * response_length
    with (
        cached_adapter_weights(model),
        model_autocast(model),
        whole_layers(model),  # else each token would gather them
        progress("sampling", tokens, "tokens") as sampling,
    ):
        for start in range(own.start, own.stop, batch_size):
            rows = slice(start, min(start + batch_size, own.stop))
            responses += _generate_batch(
                unwrap_peft(model), prompt_ids[rows], uniforms[rows], temperature, ends, sampling
            )
            trim_heap()  # the cache was copied for each token, and left pieces of all sizes
    return world.gather(responses)


def rows_per_batch(model: Any, tokens: int) -> int:
    """How many rows of at most `tokens` tokens are sampled at once, by the size of their cache."""
    config = model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", None) or 1
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    available = (
        CPU_CACHE_BYTES
        if model.device.type == "cpu"
        else GPU_CACHE_SHARE * torch.cuda.get_device_properties(model.device).total_memory
    )
    return max(int(available // (per_token * tokens)), 1)


def _generate_batch(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    uniforms: Tensor,
    temperature: float,
    ends: EndTokens,
    sampling: Pass,
) -> list[TokenIds]:
    device, uniforms = model.device, uniforms.to(model.device)
    prompts = pack(prompt_ids, [[] for _ in prompt_ids], device)
    sampled = torch.full(uniforms.shape, ends.eos, device=device)
    end_ids = torch.tensor(ends.ids, device=device)
    rows = torch.arange(len(prompt_ids), device=device)  # the rows still in the batch
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    states, cache, mask = prefill(model, prompts, max(prompts.lengths) + uniforms.shape[1])
    positions = mask.sum(1, keepdim=True)
    for step in range(uniforms.shape[1]):
        # (B, H), not the (B, 1, H) view of logits_to_keep: that one is multiplied row by row, each
        # time with a copy of the vocabulary
        token = _draw(head_logits(model, states).float(), temperature, uniforms[rows, step])
        token = token.masked_fill(~unfinished, ends.eos)
        sampled[rows, step] = token
        unfinished = unfinished & ~torch.isin(token, end_ids)
        remaining = int(unfinished.sum())
        if not remaining or step == uniforms.shape[1] - 1:
            sampling.add(len(sampled) * (uniforms.shape[1] - step))
            break
        sampling.add(len(sampled))
        # Finished rows leave the batch only now and then, because that copies the cache.
        if remaining <= COMPACT_BELOW * len(rows):
            cache.reorder_cache(unfinished.nonzero().squeeze(1))
            rows, token, positions, mask, unfinished = (
                values[unfinished] for values in (rows, token, positions, mask, unfinished)
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
    return [ends.cut(row) for row in sampled.tolist()]


def _draw(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """Draw (B,) tokens from (B, V) float32 logits by inverse CDF of (B,) uniforms.

    The logits are overwritten.
    """
    if temperature != 1:
        logits /= temperature
    cumulative = logits.sub_(logits.amax(-1, keepdim=True)).exp_().cumsum_(-1)
    token = torch.searchsorted(
        cumulative, uniforms[:, None] * cumulative[:, -1:], right=True
    ).squeeze(-1)
    # After rounding, a uniform close to 1 may reach the last cumulative value.
    return token.clamp(max=logits.shape[-1] - 1)
