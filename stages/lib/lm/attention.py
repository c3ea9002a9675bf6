"""Attention implementation `grouped`: two plain matrix products per group of query heads.

On a CPU it has the fastest forward pass, backward pass and decoding step. The numbers are those of
transformers' `eager`, which copies each key and value head for every query head that shares it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from stages.lib.lm.packing import Packed


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: Packed | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature that transformers expects.

    Args:
        module: the attention layer; not used.
        query: (B, heads, Q, D); with `packed` (1, heads, M, D), all rows end to end.
        key: (B, key heads, K, D); with `packed` (1, key heads, M, D).
        value: like `key`.
        attention_mask: additive, (B, 1, Q, K); with `packed` (1, 1, L, L).
        scaling: factor of the products of queries and keys.
        packed: the rows, if they are laid end to end.
        softcap: c of Gemma 2's c tanh(x / c), which limits scaled products x.
        s_aux: (heads,) attention sinks of gpt-oss: logits of a key without value.

    Returns:
        (B, Q, heads, D), or (1, M, heads, D) with `packed`; and None for the weights.
    """
    if packed is None:
        return _grouped(query, key, value, attention_mask, scaling, softcap, s_aux), None
    # Computed again in the backward pass, which takes little time: the (B, heads, L, L) weights of
    # all layers would take most of the memory of long rows.
    states: Tensor = checkpoint(
        _packed,
        query,
        key,
        value,
        attention_mask,
        scaling,
        packed,
        softcap,
        s_aux,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return states, None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    packed: Packed,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    query, key, value = (
        packed.pad(states[0].transpose(0, 1)).transpose(1, 2) for states in (query, key, value)
    )
    return packed.unpad(_grouped(query, key, value, mask, scaling, softcap, sinks))[None]


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, queries, size = query.shape
    key_heads = key.shape[1]
    # The query heads that share a key head become further rows of one matrix, so nothing is copied.
    grouped = (batch, key_heads, heads // key_heads * queries)
    weights = query.reshape(*grouped, size) @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = (weights / softcap).tanh() * softcap
    if mask is not None:
        weights = (weights.view(batch, heads, queries, -1) + mask).view_as(weights)
    if sinks is not None:  # one more key per head, dropped again after the softmax
        sinks = sinks.to(weights.dtype).repeat_interleave(queries).view(1, key_heads, -1, 1)
        weights = torch.cat([weights, sinks.expand(batch, -1, -1, -1)], -1)
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).view(batch, heads, queries, size).transpose(1, 2).contiguous()


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", eager_mask)
