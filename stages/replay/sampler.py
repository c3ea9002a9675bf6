"""Responses of the policy and of SFT on training prompts, with the reward model's scores."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import encode
from stages.lib.judging.fluency import Fluency
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

BATCH = 128


@dataclass(frozen=True)
class SampledResponse:
    """One response. ended: EOS was sampled."""

    text: str
    ended: bool


@dataclass(frozen=True)
class ScoredResponse(SampledResponse):
    """score: calibrated. kl: policy from SFT, nats a sequence."""

    score: float
    kl: float


@dataclass(frozen=True)
class Candidate:
    """An answer of SFT. nll: nats a token under the reference."""

    text: str
    nll: float


Drawn = Mapping[str, Sequence[Candidate]]  # by the prompt as text


class Sampler:
    """The policy and the SFT model that it comes from; each call has a random stream of its own."""

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.params, self.tokenizer = params, load_tokenizer(sft)
        policy = stage_dir(round_, "ppo") / "policy"
        self.model = load_policy(sft, policy, params.model)
        self.sft_model = None if is_adapter(policy) else load_causal_lm(sft, params.model)
        self.scorer = RewardScorer(
            stage_dir(round_, "reward") / "model", self.tokenizer, params, BATCH
        )

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredResponse]:
        ids = self._encode(prompts)
        responses = self._generate(self.model, ids, seed)
        told = score_responses(
            self.model,
            self.reference,
            ids,
            responses,
            reward_model=self.scorer.model,
            eos_token_id=self.tokenizer.eos_token_id,
            temperature=self.params.ppo.temperature,
            batch_size=BATCH,
        )
        scores = calibrate_scores(told.scores, self.scorer.model).tolist()
        draws = zip(self._draws(responses), scores, told.kl.tolist(), strict=True)
        return [ScoredResponse(draw.text, draw.ended, score, kl) for draw, score, kl in draws]

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[SampledResponse]:
        with self.reference() as model:
            return self._draws(self._generate(model, self._encode(prompts), seed))

    def reference(self) -> AbstractContextManager[Any]:
        """The SFT model."""
        return nullcontext(self.sft_model) if self.sft_model else adapter_disabled(self.model)

    def _encode(self, prompts: Sequence[Prompt]) -> list[TokenIds]:
        return [
            encode(self.tokenizer, prompt, None, self.params.prepare.prompt_format)[0]
            for prompt in prompts
        ]

    def _generate(self, model: Any, ids: list[TokenIds], seed: int) -> list[TokenIds]:
        return sample_responses(
            model, self.tokenizer, ids, self.params.ppo, torch.Generator().manual_seed(seed), BATCH
        )

    def _draws(self, responses: list[TokenIds]) -> list[SampledResponse]:
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [
            SampledResponse(text, tokens[-1] == self.tokenizer.eos_token_id)
            for text, tokens in zip(texts, responses, strict=True)
        ]


def draw(prompts: Sequence[Prompt], sampler: Sampler, params: Params) -> Drawn:
    """replay.best_of responses of SFT to each distinct prompt, of which those that end are kept."""
    asked = [
        prompt
        for prompt in {str(prompt): prompt for prompt in prompts}.values()
        for _ in range(params.replay.best_of)
    ]
    if not asked:
        return {}
    draws = sampler.sft(asked, params.seed + 1)
    with sampler.reference() as model:
        nll = Fluency(model, sampler.tokenizer, params.prepare.prompt_format)(
            asked, [each.text for each in draws]
        )
    found: dict[str, list[Candidate]] = {}
    for prompt, each, value in zip(asked, draws, nll, strict=True):
        if each.ended:
            found.setdefault(str(prompt), []).append(Candidate(each.text, value))
    return found
