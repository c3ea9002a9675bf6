"""Log-probabilities and entropies out of a vocabulary's logits, some rows at a time: no (N, V)
tensor is ever float32.

N tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.lib.core.types import TokenIds
from stages.lib.lm.packing import (
    Packed,
    _by_length,
    hidden_states,
    model_autocast,
    pack,
    unwrap_peft,
)

CELLS = 1 << 20  # logits at a time: 4 MiB in float32, which a cache holds


def selective_log_softmax(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) log-probabilities in nats, float32, of `targets` under (N, V) logits."""

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        # a quarter of the time of gather - logsumexp
        return -torch.nn.functional.cross_entropy(
            scaled(rows, temperature), wanted, reduction="none"
        )

    return chunked(part, logits, targets)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) entropies in nats, float32, of (N, V) logits."""

    def part(rows: Tensor) -> Tensor:
        logprobs = scaled(rows, temperature).log_softmax(-1)
        return -torch.linalg.vecdot(logprobs.exp(), logprobs)

    return chunked(part, logits)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits (float64 ones stay so), divided by the temperature."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def chunked(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of some rows at a time of (N, V) logits and what goes with them; in backward once
    more, so that nothing is kept.
    """
    rows = max(CELLS // tensors[0].shape[1], 1)
    parts = zip(*(each.split(rows) for each in tensors), strict=True)
    return torch.cat(
        [
            checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    )


def response_logits(model: Any, packed: Packed, hidden: Tensor) -> Tensor:
    """(N, V) logits of (M, H) states at the positions that predict response tokens, in the model's
    dtype.
    """
    with model_autocast(model):
        logits: Tensor = unwrap_peft(model).get_output_embeddings()(hidden[packed.predicts])
    return logits


def response_logprobs(model: Any, packed: Packed, hidden: Tensor, temperature: float) -> Tensor:
    """(B, T) log-probabilities in nats of response tokens, from (M, H) states."""
    return packed.to_rows(
        selective_log_softmax(response_logits(model, packed, hidden), packed.targets, temperature)
    )


@torch.no_grad()
def token_logprobs(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    *,
    temperature: float = 1.0,
    batch_size: int = 64,
) -> list[Tensor]:
    """For each row (T,) log-probabilities in nats, float32 on the CPU, of its response tokens given
    prompt and predecessors.
    """
    result: list[Tensor] = [torch.empty(0)] * len(prompt_ids)
    for batch in _by_length(
        [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)], batch_size
    ):
        packed = pack(
            [prompt_ids[i] for i in batch],
            [response_ids[i] for i in batch],
            unwrap_peft(model).device,
        )
        flat = selective_log_softmax(
            response_logits(model, packed, hidden_states(model, packed)),
            packed.targets,
            temperature,
        ).cpu()
        for i, row in zip(batch, flat.split([len(response_ids[i]) for i in batch]), strict=True):
            result[i] = row
    return result
