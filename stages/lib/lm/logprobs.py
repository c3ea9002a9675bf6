"""Log-probabilities and entropies out of a vocabulary's logits, some rows at a time: no (N, V)
tensor is ever float32.

N tokens, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CELLS = 1 << 20  # logits at a time: 4 MiB in float32, which a cache holds


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) log-probabilities in nats, float32, of `targets` under (N, V) logits."""

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        # a quarter of the time of gather - logsumexp
        return -torch.nn.functional.cross_entropy(
            scaled(rows, temperature), wanted, reduction="none"
        )

    return by_parts(part, logits, targets)


def entropies_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """(N,) entropies in nats, float32, of (N, V) logits."""

    def part(rows: Tensor) -> Tensor:
        logprobs = scaled(rows, temperature).log_softmax(-1)
        return -torch.linalg.vecdot(logprobs.exp(), logprobs)

    return by_parts(part, logits)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits (float64 ones stay so), divided by the temperature."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def by_parts(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
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
