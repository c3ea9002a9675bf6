"""A model answers prompts: its responses, and what reward model and reference say of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import decode, encode
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import Reference
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.lib.lm.scoring import score_responses
from stages.lib.lm.vllm_engine import VllmEngine, sampling_engine


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
    kl: float  # of the policy from the reference, nats per sequence
    ref_logprob: float  # under the reference, nats per sequence


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
        ends = end_tokens(model, self.tokenizer)
        tokens = (self.engine.sample if self.engine else generate)(
            model,
            prompt_ids,
            response_length=self.response_length,
            temperature=self.temperature,
            generator=torch.Generator().manual_seed(seed),
            ends=ends,
        )
        texts = decode(self.tokenizer, tokens)
        return [
            Response(prompt, response, text, ends.end(response))
            for prompt, response, text in zip(prompt_ids, tokens, texts, strict=True)
        ]

    def scored(
        self,
        responses: Sequence[Response],
        policy: Any | None,
        reference: Reference,
        reward_model: Any = None,
    ) -> list[ScoredResponse]:
        """Responses with their scores.

        Args:
            responses: of one model.
            policy: the model that sampled them; None: the reference did, and their KL is 0.
            reference: opens a context with the reference model.
            reward_model: a reward model or its ensemble; None: scores are 0.
        """
        with reference() as model:
            ends = end_tokens(policy or model, self.tokenizer)
        results = score_responses(
            policy,
            reference,
            [response.prompt_ids for response in responses],
            [response.tokens for response in responses],
            reward_model=reward_model,
            ends=ends,
            temperature=self.temperature,
        )
        scores = calibrate_scores(results.scores, reward_model) if reward_model else results.scores
        columns = (column.tolist() for column in (scores, results.kl, results.ref_logprobs))
        return [
            ScoredResponse(
                response.prompt_ids, response.tokens, response.text, response.ended, *row
            )
            for response, *row in zip(responses, *columns, strict=True)
        ]


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
