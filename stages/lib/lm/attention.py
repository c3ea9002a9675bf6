"""Attention as two plain matrix products a group of query heads: on a CPU the fastest forward,
backward and decoding step.

The same numbers as transformers' `eager`, which copies each key and value head for every query head
that shares it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from stages.lib.core.errors import BadInput
from stages.lib.lm.packing import Packed


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(B, Q, heads, D) of query (B, heads, Q, D), key and value (B, key heads, K, D) and an
    additive mask (B, 1, Q, K).

    `packed`: query, key and value are (1, heads, M, D) of rows end to end; the mask is (1, 1, L,
    L).
    """
    if packed is None:
        return _grouped(query, key, value, attention_mask, scaling), None
    if sliding_window and max(packed.lengths) > sliding_window:
        raise BadInput(
            f"model.attn_implementation `grouped` knows no sliding windows, and this model's ({sliding_window} tokens) is shorter "
            "than the texts: set it to sdpa"
        )
    query, key, value = (
        packed.pad(each[0].transpose(0, 1)).transpose(1, 2) for each in (query, key, value)
    )
    return packed.unpad(_grouped(query, key, value, attention_mask, scaling))[None], None


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    batch, heads, queries, size = query.shape
    shared = key.shape[1]
    grouped = (batch, shared, heads // shared * queries)
    weights = query.reshape(*grouped, size) @ key.transpose(2, 3) * scaling
    if mask is not None:
        weights = (weights.view(batch, heads, queries, -1) + mask).view_as(weights)
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).view(batch, heads, queries, size).transpose(1, 2).contiguous()


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", eager_mask)
