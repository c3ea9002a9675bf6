"""A model answers prompts: its responses, and what reward model and reference say of them.

Shapes: B sequences in a batch, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.heap import trim_heap
from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.progress import Pass, progress
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import decode, encode
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens, end_tokens
from stages.lib.lm.logprobs import Reference, compare_states, response_logprobs
from stages.lib.lm.lora import cached_adapter_weights
from stages.lib.lm.packing import (
    forward_layers,
    model_autocast,
    num_shared_layers,
    pack,
    prefill,
    unwrap_peft,
)
from stages.lib.lm.scoring import (
    calibrate_scores,
    ensemble_members,
    ensemble_scores,
    last_scores,
)
from stages.lib.lm.vllm_engine import VllmEngine, sampling_engine
from stages.lib.lm.world import batches_by_tokens, in_step, is_sharded, whole_layers

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

    Raises:
        BadInput: the model has a sliding window that is shorter than a prompt, and attention is
            `grouped`.

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
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
    device, head = model.device, model.get_output_embeddings()
    prompts = pack(prompt_ids, [[] for _ in prompt_ids], device)
    mask = prompts.pad(torch.ones_like(prompts.input_ids))  # of the tokens in the cache
    positions, uniforms = mask.sum(1, keepdim=True), uniforms.to(device)
    sampled = torch.full(uniforms.shape, ends.eos, device=device)
    end_ids = torch.tensor(ends.ids, device=device)
    rows = torch.arange(len(prompt_ids), device=device)  # the rows still in the batch
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    states, cache = prefill(model, prompts)
    for step in range(uniforms.shape[1]):
        # (B, H), not the (B, 1, H) view of logits_to_keep: that one is multiplied row by row, each
        # time with a copy of the vocabulary
        token = _draw(head(states).float(), temperature, uniforms[rows, step])
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
            cache.batch_select_indices(unfinished.nonzero().squeeze(1))
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


@dataclass(frozen=True)
class Response:
    """A sampled response to a prompt."""

    prompt_ids: TokenIds
    tokens: TokenIds  # with the end token, if one was sampled
    text: str  # without special tokens
    ended: bool  # whether an end token was sampled


@dataclass(frozen=True)
class ScoredResponse(Response):
    """A response with its score and its distance from the reference."""

    score: float  # of the reward model, calibrated
    # Of the policy from the reference, nats per sequence: the sum over the response's tokens of the
    # exact KL of the two distributions that the token was sampled from. Its mean estimates the KL
    # of sequences without bias and with less variance than log-ratios; it is never negative.
    kl: float
    ref_logprob: float  # under the reference, nats per sequence


def sample_responses(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[TokenIds],
    generator: torch.Generator,
    *,
    response_length: int,
    temperature: float,
    engine: VllmEngine | None = None,
) -> list[Response]:
    """Sample one response per prompt.

    Args:
        model: a causal language model or a PeftModel.
        tokenizer: its tokenizer.
        prompt_ids: tokens of each prompt.
        generator: source of random numbers, on the CPU.
        response_length: tokens per response at most.
        temperature: divides the logits.
        engine: vLLM, which samples in place of `generate`; None: `generate` does.

    Example:
        responses = sample_responses(
            model,
            tokenizer,
            prompt_ids,
            torch.Generator().manual_seed(0),
            response_length=24,
            temperature=1.0,
            engine=sampling_engine(params.model),
        )
    """
    ends = end_tokens(model, tokenizer)
    tokens = (engine.sample if engine else generate)(
        model,
        prompt_ids,
        response_length=response_length,
        temperature=temperature,
        generator=generator,
        ends=ends,
    )
    return [
        Response(prompt, response, text, ends.end(response))
        for prompt, response, text in zip(
            prompt_ids, tokens, decode(tokenizer, tokens), strict=True
        )
    ]


@torch.no_grad()
def score_responses(
    responses: Sequence[Response],
    policy: Any | None,
    reference: Reference,
    tokenizer: Any,
    *,
    reward_model: Any = None,
    temperature: float,
) -> list[ScoredResponse]:
    """Score sampled responses: KL to the reference, and the reward model's score.

    The layers that policy, reference and reward model share run once per batch.

    Args:
        responses: of one model, each with one token at least.
        policy: the model that sampled them; None: the reference did, and their KL is 0.
        reference: opens a context with the reference model.
        tokenizer: of both; the reward model reads its EOS at the end of each response.
        reward_model: a reward model or its ensemble; None: scores are 0.
        temperature: divides the logits of policy and reference, as in sampling.

    Example:
        scored = score_responses(
            responses,
            policy,
            lambda: adapter_disabled(policy),
            tokenizer,
            reward_model=reward_model,
            temperature=1.0,
        )
        mean_kl = fmean(response.kl for response in scored)  # nats per sequence
    """
    scores, kl, ref_logprobs = (torch.zeros(len(responses)) for _ in range(3))
    with reference() as model:
        ends = end_tokens(policy or model, tokenizer)
        models = [
            model,
            *([policy] if policy else []),
            *(ensemble_members(reward_model) if reward_model else []),
        ]
        common = 0 if is_sharded(model) else num_shared_layers(*models)
        device = unwrap_peft(model).device
    lengths = [len(response.prompt_ids) + len(response.tokens) for response in responses]
    batches = batches_by_tokens(lengths, device, "scoring")
    for batch, is_own in in_step(model, batches, [0]):
        packed = pack(
            [responses[i].prompt_ids for i in batch],
            [responses[i].tokens for i in batch],
            device,
            ends,
        )
        # The reference runs all layers; the others start from the states that enter layer `common`.
        with reference() as model:
            ref_hidden, [entering] = forward_layers(model, packed, keep=[common])
            if policy is None:
                batch_logprobs = response_logprobs(model, packed, ref_hidden, temperature)
        start = entering if common else None
        if policy:
            hidden, _ = forward_layers(policy, packed, start, common)
            compared = compare_states(policy, reference, packed, hidden, ref_hidden, temperature)
            batch_logprobs = compared.ref_logprobs
        if reward_model:
            batch_scores = ensemble_scores(
                reward_model, partial(last_scores, packed=packed, entering=start, first=common)
            )
        if not is_own:
            continue
        ref_logprobs[batch] = batch_logprobs.sum(1).cpu()
        if policy:
            kl[batch] = compared.kl.sum(1).cpu()
        if reward_model:
            scores[batch] = batch_scores.cpu()
    world.add_up([scores, kl, ref_logprobs])
    if reward_model:
        scores = calibrate_scores(scores, reward_model)
    columns = (column.tolist() for column in (scores, kl, ref_logprobs))
    return [
        ScoredResponse(**vars(response), score=score, kl=distance, ref_logprob=logprob)
        for response, score, distance, logprob in zip(responses, *columns, strict=True)
    ]


@dataclass(frozen=True)
class Responder:
    """How models answer prompts; `responder` makes one.

    Example:
        respond = responder(params, tokenizer)
        responses = respond(model, ["The dinner"], seed=0)
        scored = respond.scored(responses, model, lambda: nullcontext(sft), reward_model)
    """

    tokenizer: Any
    prompt_format: PromptFormat
    response_length: int  # tokens at most
    temperature: float  # divides the logits
    engine: VllmEngine | None  # samples in place of `generate`
    max_prompt_length: int | None = None  # tokens of a prompt at most; None: no limit

    def __call__(self, model: Any, prompts: Sequence[Prompt], seed: int) -> list[Response]:
        """One response of a model per prompt.

        Calls with the same seed and number of prompts have the same random numbers, whatever the
        model.
        """
        prompt_ids = [
            encode(self.tokenizer, prompt, None, self.prompt_format, self.max_prompt_length)[0]
            for prompt in prompts
        ]
        return sample_responses(
            model,
            self.tokenizer,
            prompt_ids,
            torch.Generator().manual_seed(seed),
            response_length=self.response_length,
            temperature=self.temperature,
            engine=self.engine,
        )

    def scored(
        self,
        responses: Sequence[Response],
        policy: Any | None,
        reference: Reference,
        reward_model: Any = None,
    ) -> list[ScoredResponse]:
        """Responses with their scores, by `score_responses`."""
        return score_responses(
            responses,
            policy,
            reference,
            self.tokenizer,
            reward_model=reward_model,
            temperature=self.temperature,
        )


def responder(
    params: Params,
    tokenizer: Any,
    *,
    response_length: int | None = None,
    temperature: float | None = None,
    max_prompt_length: int | None = None,
) -> Responder:
    """Responses as PPO samples them, but for what is given here."""
    ppo = params.ppo
    return Responder(
        tokenizer,
        params.prepare.prompt_format,
        ppo.response_length if response_length is None else response_length,
        ppo.temperature if temperature is None else temperature,
        sampling_engine(params.model),
        max_prompt_length,
    )
