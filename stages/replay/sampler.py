"""Responses of the policy and of SFT to training prompts, with the reward model's scores."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import decode, encode
from stages.lib.judging.fluency import Fluency
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.loading import (
    adapter_disabled,
    is_adapter,
    load_causal_lm,
    load_policy,
    load_tokenizer,
)
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.lib.lm.scoring import RewardScorer, score_responses
from stages.lib.lm.vllm_engine import sampling_engine


@dataclass(frozen=True)
class SampledResponse:
    """One response. ended: whether an end token was sampled."""

    text: str
    ended: bool


@dataclass(frozen=True)
class ScoredResponse(SampledResponse):
    """score: calibrated. kl: of the policy from SFT, nats per sequence."""

    score: float
    kl: float


@dataclass(frozen=True)
class Candidate:
    """An answer of SFT. nll: nats per token under the reference."""

    text: str
    nll: float


CandidatesByPrompt = Mapping[str, Sequence[Candidate]]  # by str(prompt)


class Sampler:
    """The policy, its SFT model and the reward model; each call has its own random stream."""

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.params, self.tokenizer = params, load_tokenizer(sft)
        policy = stage_dir(round_, "ppo") / "policy"
        self.model = load_policy(sft, policy, params.model)
        self.sft_model = None if is_adapter(policy) else load_causal_lm(sft, params.model)
        self.scorer = RewardScorer(stage_dir(round_, "reward") / "model", self.tokenizer, params)

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredResponse]:
        """One scored response of the policy per prompt."""
        ids = self._encode(prompts)
        responses = self._generate(self.model, ids, seed)
        scored = score_responses(
            self.model,
            self.reference,
            ids,
            responses,
            reward_model=self.scorer.model,
            ends=end_tokens(self.model, self.tokenizer),
            temperature=self.params.ppo.temperature,
        )
        scores = calibrate_scores(scored.scores, self.scorer.model).tolist()
        return [
            ScoredResponse(response.text, response.ended, score, kl)
            for response, score, kl in zip(
                self._decode(responses), scores, scored.kl.tolist(), strict=True
            )
        ]

    def policy_texts(self, prompts: Sequence[Prompt], seed: int) -> list[SampledResponse]:
        """One response of the policy per prompt, not scored."""
        return self._decode(self._generate(self.model, self._encode(prompts), seed))

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[SampledResponse]:
        """One response of SFT per prompt."""
        with self.reference() as model:
            return self._decode(self._generate(model, self._encode(prompts), seed))

    def reference(self) -> AbstractContextManager[Any]:
        """A context with the SFT model: a model of its own, or the policy without its adapter."""
        return nullcontext(self.sft_model) if self.sft_model else adapter_disabled(self.model)

    def _encode(self, prompts: Sequence[Prompt]) -> list[TokenIds]:
        return [
            encode(self.tokenizer, prompt, None, self.params.prepare.prompt_format)[0]
            for prompt in prompts
        ]

    def _generate(self, model: Any, ids: list[TokenIds], seed: int) -> list[TokenIds]:
        return sample_responses(
            model,
            self.tokenizer,
            ids,
            self.params.ppo,
            torch.Generator().manual_seed(seed),
            sampling_engine(self.params.model),
        )

    def _decode(self, responses: list[TokenIds]) -> list[SampledResponse]:
        texts = decode(self.tokenizer, responses)
        ends = end_tokens(self.model, self.tokenizer)
        return [
            SampledResponse(text, ends.end(tokens))
            for text, tokens in zip(texts, responses, strict=True)
        ]


def sample_candidates(
    prompts: Sequence[Prompt], sampler: Sampler, params: Params
) -> CandidatesByPrompt:
    """replay.best_of responses of SFT per distinct prompt; those that do not end are dropped."""
    distinct = {str(prompt): prompt for prompt in prompts}.values()
    repeated = [prompt for prompt in distinct for _ in range(params.replay.best_of)]
    if not repeated:
        return {}
    responses = sampler.sft(repeated, params.seed + 1)
    with sampler.reference() as model:
        fluency = Fluency(model, sampler.tokenizer, params.prepare.prompt_format)
        nll = fluency(repeated, [response.text for response in responses])
    candidates: dict[str, list[Candidate]] = {}
    for prompt, response, value in zip(repeated, responses, nll, strict=True):
        if response.ended:
            candidates.setdefault(str(prompt), []).append(Candidate(response.text, value))
    return candidates
