"""Sampling from a causal LM, and the log-probabilities and scores of what was sampled.

Dimensions: B sequences, T response tokens of one, N of all, M prompt and response tokens of all, V
vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.lib.core.params import PpoParams
from stages.lib.lm.loading import combined, members
from stages.lib.lm.logprobs import logprobs_of
from stages.lib.lm.lora import holding
from stages.lib.lm.packing import Packed, Tokens, hidden_states, pack, precision, prefill, unwrap
from stages.lib.lm.shared_layers import common_layers, through

Reference = Callable[
    [], AbstractContextManager[Any]
]  # a context in which a model is what it was before PPO: an adapter is off

LEAVE = 0.75  # share of a batch still being sampled, at which the others leave it


def scalar_head(model: Any, hidden: Tensor) -> Tensor:
    """(...) scores of (..., H) states, in float32: in bfloat16 a score near 3 moves in steps of
    0.016.
    """
    return torch.nn.functional.linear(hidden.float(), unwrap(model).score.weight.float()).squeeze(
        -1
    )


def last_scores(model: Any, packed: Packed, entering: Tensor | None, first: int) -> Tensor:
    """(B,) raw scores at the rows' last tokens, from the (M, H) states that enter layer `first`, or
    from the tokens.
    """
    return scalar_head(model, through(model, packed, entering, first)[0][packed.last])


def response_logits(model: Any, packed: Packed, hidden: Tensor) -> Tensor:
    """(N, V) logits of (M, H) states at the positions that predict response tokens, in the model's
    dtype.
    """
    with precision(model):
        logits: Tensor = unwrap(model).get_output_embeddings()(hidden[packed.predicts])
    return logits


def response_logprobs(model: Any, packed: Packed, hidden: Tensor, temperature: float) -> Tensor:
    """(B, T) log-probabilities in nats of response tokens, from (M, H) states."""
    return packed.rows(
        logprobs_of(response_logits(model, packed, hidden), packed.targets, temperature)
    )


def _by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of like length, so that little padding is computed."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return (order[i : i + batch_size] for i in range(0, len(order), batch_size))


@torch.no_grad()
def token_logprobs(
    model: Any,
    prompt_ids: Sequence[Tokens],
    response_ids: Sequence[Tokens],
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
            [prompt_ids[i] for i in batch], [response_ids[i] for i in batch], unwrap(model).device
        )
        flat = logprobs_of(
            response_logits(model, packed, hidden_states(model, packed)),
            packed.targets,
            temperature,
        ).cpu()
        for i, row in zip(batch, flat.split([len(response_ids[i]) for i in batch]), strict=True):
            result[i] = row
    return result


class Assessed(NamedTuple):
    """Of B responses, float32 on the CPU. kl, ref_logprobs: (B,) nats a sequence; scores: (B,) raw,
    where there is a reward model.
    """

    kl: Tensor
    ref_logprobs: Tensor
    scores: Tensor


@torch.no_grad()
def assess(
    policy: Any | None,
    reference: Reference,
    prompt_ids: Sequence[Tokens],
    response_ids: Sequence[Tokens],
    *,
    reward_model: Any = None,
    eos_token_id: int,
    temperature: float,
    batch_size: int,
) -> Assessed:
    """The log-ratio of policy to reference (0 where there is no policy), and what a reward model
    says, which reads responses up to EOS.

    Layers that these models have in common run once.
    """
    told = Assessed(*(torch.zeros(len(prompt_ids)) for _ in Assessed._fields))
    with reference() as model:
        together = [
            model,
            *([policy] if policy else []),
            *(members(reward_model) if reward_model else []),
        ]
        common, device = common_layers(*together), unwrap(model).device
    for batch in _by_length(
        [len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True)], batch_size
    ):
        packed = pack(
            [prompt_ids[i] for i in batch], [response_ids[i] for i in batch], device, eos_token_id
        )
        with reference() as model:
            hidden, [entering] = through(model, packed, keep=[common])
            theirs = own = response_logprobs(model, packed, hidden, temperature)
        start = entering if common else None
        if policy:
            own = response_logprobs(
                policy, packed, through(policy, packed, start, common)[0], temperature
            )
        told.kl[batch], told.ref_logprobs[batch] = (own - theirs).sum(1).cpu(), theirs.sum(1).cpu()
        if reward_model:
            told.scores[batch] = combined(
                reward_model, partial(last_scores, packed=packed, entering=start, first=common)
            ).cpu()
    return told


def reward_scores(model: Any, sequences: Sequence[Tokens], *, batch_size: int = 64) -> Tensor:
    """(B,) raw scores of a reward model or its ensemble, as `own_scores` has them of one member."""
    return combined(model, lambda member: own_scores(member, sequences, batch_size=batch_size))


@torch.no_grad()
def own_scores(model: Any, sequences: Sequence[Tokens], *, batch_size: int = 64) -> Tensor:
    """(B,) raw scores, float32 on the CPU, read at each sequence's last token (EOS, where it was
    trained with EOS).
    """
    scores = torch.empty(len(sequences))
    for batch in _by_length([len(s) for s in sequences], batch_size):
        packed = pack([sequences[i] for i in batch], [[] for _ in batch], unwrap(model).device)
        scores[torch.tensor(batch)] = scalar_head(
            model, hidden_states(model, packed)[packed.last]
        ).cpu()
    return scores


@torch.no_grad()
def generate(
    model: Any,
    prompt_ids: Sequence[Tokens],
    *,
    response_length: int,
    temperature: float,
    generator: torch.Generator,
    batch_size: int,
    eos_token_id: int,
) -> list[Tokens]:
    """Sample one response a prompt; EOS is kept where it was sampled.

    One uniform number a row and token is drawn first and turned into a token by inverse CDF: this
    is far faster than torch.multinomial on a CPU, and two models given the same generator state see
    the same random numbers.
    """
    uniforms = torch.rand(len(prompt_ids), response_length, generator=generator)
    responses: list[Tokens] = []
    with holding(model), precision(model):
        for start in range(0, len(prompt_ids), batch_size):
            rows = slice(start, start + batch_size)
            responses += _generate_batch(
                unwrap(model), prompt_ids[rows], uniforms[rows], temperature, eos_token_id
            )
    return responses


def sample(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[Tokens],
    ppo: PpoParams,
    generator: torch.Generator,
    batch_size: int,
) -> list[Tokens]:
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
    model: Any, prompt_ids: Sequence[Tokens], uniforms: Tensor, temperature: float, eos: int
) -> list[Tokens]:
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
        if left <= LEAVE * len(
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


def _until_eos(tokens: Tokens, eos: int) -> Tokens:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
