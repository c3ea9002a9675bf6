"""Log-probabilities and entropies from logits, computed in chunks to save memory.

No (N, V) tensor is ever float32. Shapes: N tokens, V vocabulary; the others as in packing.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.lib.core.types import TokenIds
from stages.lib.lm.packing import (
    SCORING_BATCH_SIZE,
    Packed,
    batches_by_length,
    hidden_states,
    model_autocast,
    pack,
    unwrap_peft,
)

CELLS = 1 << 20  # logits per chunk: 4 MiB in float32, which fit in the processor's cache


def selective_log_softmax(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) float32 log-probabilities, in nats, of (N,) `targets` under (N, V) logits."""

    def part(rows: Tensor, tokens: Tensor) -> Tensor:
        # takes a quarter of the time of gather - logsumexp
        return -torch.nn.functional.cross_entropy(
            scaled(rows, temperature), tokens, reduction="none"
        )

    return chunked(part, logits, targets)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) float32 entropies, in nats, of (N, V) logits."""

    def part(rows: Tensor) -> Tensor:
        logprobs = scaled(rows, temperature).log_softmax(-1)
        return -torch.linalg.vecdot(logprobs.exp(), logprobs)

    return chunked(part, logits)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits as float32 (float64 stays float64), divided by the temperature."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def chunked(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to chunks of rows, and concatenate the results.

    The backward pass computes each chunk again, so that no float32 copy of the logits is kept.

    Args:
        function: maps a chunk of each tensor to one value per row.
        tensors: (N, V) logits first, then further tensors with N rows.
    """
    rows = max(CELLS // tensors[0].shape[1], 1)
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return torch.cat(
        [
            checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    )


def response_logits(model: Any, packed: Packed, hidden: Tensor) -> Tensor:
    """(N, V) logits that predict the response tokens, in the model's dtype.

    hidden: (M, H) last hidden states.
    """
    with model_autocast(model):
        logits: Tensor = unwrap_peft(model).get_output_embeddings()(hidden[packed.predicts])
    return logits


def response_logprobs(model: Any, packed: Packed, hidden: Tensor, temperature: float) -> Tensor:
    """(B, T) log-probabilities, in nats, of response tokens, from (M, H) last hidden states."""
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
    batch_size: int = SCORING_BATCH_SIZE,
) -> list[Tensor]:
    """Log-probabilities of responses under a causal language model.

    Returns:
        Per row, the float32 log-probabilities, in nats, of its response tokens, on the CPU.
    """
    result: list[Tensor] = [torch.empty(0)] * len(prompt_ids)
    lengths = [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    for batch in batches_by_length(lengths, batch_size):
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
