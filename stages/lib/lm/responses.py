"""A model answers prompts: its responses, and what reward model and reference say of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import decode, encode
from stages.lib.lm import world
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import Reference, compare_states, response_logprobs
from stages.lib.lm.packing import (
    forward_layers,
    num_shared_layers,
    pack,
    unwrap_peft,
)
from stages.lib.lm.scoring import (
    RewardScorer,
    calibrate_scores,
    ensemble_members,
    ensemble_scores,
    last_scores,
)
from stages.lib.lm.vllm_engine import VllmEngine, sampling_engine
from stages.lib.lm.world import batches_by_tokens, in_step, is_sharded


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

    score: float | None  # of the reward model, calibrated; None: there is none
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
        reward_model: a reward model or its ensemble; None: there are no scores.
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
    unknown = [None] * len(responses)
    calibrated = calibrate_scores(scores, reward_model).tolist() if reward_model else unknown
    columns = calibrated, kl.tolist(), ref_logprobs.tolist()
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
        scored = respond.scored(["The dinner"], responses, model, lambda: nullcontext(sft), scorer)
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
        prompts: Sequence[Prompt],
        responses: Sequence[Response],
        policy: Any | None,
        reference: Reference,
        scorer: RewardScorer | None = None,
    ) -> list[ScoredResponse]:
        """Responses with their scores, by `score_responses`. A reward model with a tokenizer of its
        own reads the texts.
        """
        reads_tokens = scorer is not None and scorer.reads(self.tokenizer)
        scored = score_responses(
            responses,
            policy,
            reference,
            self.tokenizer,
            reward_model=scorer.model if scorer and reads_tokens else None,
            temperature=self.temperature,
        )
        if scorer is None or reads_tokens:
            return scored
        scores = scorer(prompts, [response.text for response in responses])
        return [replace(row, score=score) for row, score in zip(scored, scores, strict=True)]


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
