"""Log-probabilities, entropies and KL of response tokens, from last hidden states.

The (N, V) logits never exist as a whole: the vocabulary head runs on pieces of the N states, and
the backward pass runs it again. Within a piece, float32 copies exist of one chunk at a time.
Shapes: N tokens, V vocabulary, H hidden size; the others as in packing.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.lib.core.types import TokenIds
from stages.lib.lm import world
from stages.lib.lm.packing import Packed, hidden_states, model_autocast, pack, unwrap_peft
from stages.lib.lm.world import batches_by_tokens

# Logits that exist at once in the model's dtype, on a CPU and on other devices: 128 and 256 MiB in
# bfloat16. Where one piece holds all tokens, nothing is computed twice.
CPU_PIECE, GPU_PIECE = 1 << 26, 1 << 27
# Logits that exist at once in float32: on a CPU 4 MiB, which fit in the processor's cache.
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 26

# Opens a context with the model as it was before PPO, e.g. with its adapter switched off
Reference = Callable[[], AbstractContextManager[Any]]


class TokenStatistics(NamedTuple):
    """Of (N,) or (B, T) response tokens, in nats: log-probabilities under the policy and under the
    reference; of the distributions that they were sampled from, the entropy of the policy and its
    exact KL to the reference, sum_v p(v) log(p(v) / q(v)).
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    entropies: Tensor
    kl: Tensor


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


def compare_logits(
    logits: Tensor, ref_logits: Tensor, targets: Tensor, temperature: float = 1.0
) -> TokenStatistics:
    """Statistics of (N,) `targets` under (N, V) logits of policy and reference, float32."""

    def part(rows: Tensor, ref_rows: Tensor, tokens: Tensor) -> Tensor:
        logprobs = scaled(rows, temperature).log_softmax(-1)
        ref_logprobs = scaled(ref_rows, temperature).log_softmax(-1)
        chosen = (values.gather(1, tokens[:, None])[:, 0] for values in (logprobs, ref_logprobs))
        probabilities = logprobs.exp()
        entropies = -torch.linalg.vecdot(probabilities, logprobs)
        kl = -entropies - torch.linalg.vecdot(probabilities, ref_logprobs)
        return torch.stack([*chosen, entropies, kl], 1)

    return TokenStatistics(*chunked(part, logits, ref_logits, targets).unbind(1))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits as float32 (float64 stays float64), divided by the temperature."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def chunked(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to chunks of rows, and concatenate the results.

    The backward pass computes each chunk again, so that no float32 copy of the logits is kept.

    Args:
        function: maps a chunk of each tensor to one result per row.
        tensors: (N, V) logits first, then further tensors with N rows.
    """
    cells = CPU_CHUNK if tensors[0].device.type == "cpu" else GPU_CHUNK
    return torch.cat(
        [_recomputed(function, *part) for part in _split(cells // tensors[0].shape[1], tensors)]
    )


def in_pieces(function: Callable[..., Tensor], model: Any, *tensors: Tensor) -> Tensor:
    """Apply a function that runs the vocabulary head to pieces of rows; concatenate the results.

    The backward pass computes each piece again if there are several.

    Args:
        function: maps a piece of each tensor to one result per row.
        model: the causal language model whose head runs.
        tensors: (N, H) states first, then further tensors with N rows.
    """
    head = unwrap_peft(model).get_output_embeddings()
    cells = CPU_PIECE if tensors[0].device.type == "cpu" else GPU_PIECE
    pieces = _split(cells // head.weight.shape[0], tensors)
    if len(pieces) == 1:
        return function(*tensors)
    return torch.cat([_recomputed(function, *piece) for piece in pieces])


def _split(rows: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(max(rows, 1)) for tensor in tensors), strict=True))


def _recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return result


def head_logits(model: Any, states: Tensor) -> Tensor:
    """(N, V) logits from (N, H) last hidden states, in the model's dtype."""
    inner = unwrap_peft(model)
    with model_autocast(model):
        return final_logits(inner.config.get_text_config(), inner.get_output_embeddings()(states))


def final_logits(config: Any, logits: Tensor) -> Tensor:
    """Logits as a model's config changes them after the head: by a factor (Cohere, Granite,
    Falcon-H1), then c of c tanh(x / c), which limits them (Gemma 2 and 3n, NanoChat).
    """
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, key, None)) not in (None, 1):
            logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) not in (None, 1):
        logits = logits * divisor if config.model_type == "hyperclovax" else logits / divisor
    if limit := getattr(config, "final_logit_softcapping", None):
        logits = (logits / limit).tanh() * limit
    return logits


def logprobs_from_states(
    model: Any, states: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """(N,) float32 log-probabilities, in nats, of `targets` (N,), from (N, H) last states."""

    def piece(rows: Tensor, tokens: Tensor) -> Tensor:
        return selective_log_softmax(head_logits(model, rows), tokens, temperature)

    return in_pieces(piece, model, states, targets)


@torch.no_grad()
def compare_states(
    policy: Any,
    reference: Reference,
    packed: Packed,
    hidden: Tensor,
    ref_hidden: Tensor,
    temperature: float,
) -> TokenStatistics:
    """(B, T) statistics of response tokens, from (M, H) last states of policy and reference."""

    def piece(rows: Tensor, ref_rows: Tensor, tokens: Tensor) -> Tensor:
        with reference() as model:
            ref_logits = head_logits(model, ref_rows)
        logits = head_logits(policy, rows)
        return torch.stack(compare_logits(logits, ref_logits, tokens, temperature), 1)

    states = hidden[packed.predicts], ref_hidden[packed.predicts]
    flat = in_pieces(piece, policy, *states, packed.targets)
    return TokenStatistics(*map(packed.to_rows, flat.unbind(1)))


def response_logprobs(model: Any, packed: Packed, hidden: Tensor, temperature: float) -> Tensor:
    """(B, T) log-probabilities, in nats, of response tokens, from (M, H) last hidden states."""
    return packed.to_rows(
        logprobs_from_states(model, hidden[packed.predicts], packed.targets, temperature)
    )


def response_entropies(model: Any, packed: Packed, hidden: Tensor, temperature: float) -> Tensor:
    """(B, T) entropies, in nats, at response tokens, from (M, H) last hidden states."""

    def piece(rows: Tensor) -> Tensor:
        return entropy_from_logits(head_logits(model, rows), temperature)

    return packed.to_rows(in_pieces(piece, model, hidden[packed.predicts]))


@torch.no_grad()
def token_logprobs(
    model: Any,
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Log-probabilities of responses under a causal language model.

    Returns:
        Per row, the float32 log-probabilities, in nats, of its response tokens, on the CPU.
    """
    result = [torch.zeros(len(ids)) for ids in response_ids]
    lengths = [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)]
    device = unwrap_peft(model).device
    for batch in batches_by_tokens(lengths, device, "log-probabilities"):
        packed = pack([prompt_ids[i] for i in batch], [response_ids[i] for i in batch], device)
        states = hidden_states(model, packed)[packed.predicts]
        flat = logprobs_from_states(model, states, packed.targets, temperature).cpu()
        for i, row in zip(batch, flat.split([len(response_ids[i]) for i in batch]), strict=True):
            result[i] = row
    world.add_up(result)
    return result
