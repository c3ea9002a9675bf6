"""Responses of the policy and of SFT on training prompts, with the reward model's scores."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.generation import Tokens, closed, generate, reward_scores, sequence_kl
from stages.models import adapter_off, calibrated, is_adapter, load_causal_lm, load_policy, load_reward_model, load_tokenizer
from stages.params import Params
from stages.prompts import Prompt, encode
from stages.records import stage_dir

BATCH = 128


@dataclass(frozen=True)
class Draw:
    """One response. ended: EOS was sampled."""

    text: str
    ended: bool


@dataclass(frozen=True)
class PolicyDraw(Draw):
    """score: calibrated. kl: policy from SFT, nats a sequence."""

    score: float
    kl: float


class Scorer:
    """Calibrated scores of whole responses (with EOS) under a reward model."""

    def __init__(self, path: Path, tokenizer: Any, params: Params) -> None:
        self.model, self.tokenizer, self.params = load_reward_model(path, params.model), tokenizer, params

    def tokens(self, sequences: Sequence[Tokens]) -> list[float]:
        raw = reward_scores(self.model, sequences, batch_size=BATCH, pad_token_id=self.tokenizer.pad_token_id)
        scores: list[float] = calibrated(raw, self.model).tolist()
        return scores

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        encoded = (encode(self.tokenizer, p, r, self.params.prepare.prompt_format) for p, r in zip(prompts, responses, strict=True))
        return self.tokens([prompt + response for prompt, response in encoded])


class Sampler:
    """The policy and the SFT model that it comes from; each call has a random stream of its own."""

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.params, self.tokenizer = params, load_tokenizer(sft)
        policy = stage_dir(round_, "ppo") / "policy"
        self.model = load_policy(sft, policy, params.model)
        self.sft_model = None if is_adapter(policy) else load_causal_lm(sft, params.model)
        self.scorer = Scorer(stage_dir(round_, "reward") / "model", self.tokenizer, params)

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[PolicyDraw]:
        ids = self._encode(prompts)
        responses = self._generate(self.model, ids, seed)
        scores = self.scorer.tokens([a + b for a, b in zip(ids, closed(responses, self.tokenizer.eos_token_id), strict=True)])
        kls = sequence_kl(
            self.model,
            self.reference,
            ids,
            responses,
            temperature=self.params.ppo.temperature,
            batch_size=BATCH,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return [PolicyDraw(draw.text, draw.ended, score, kl) for draw, score, kl in zip(self._draws(responses), scores, kls, strict=True)]

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[Draw]:
        with self.reference() as model:
            return self._draws(self._generate(model, self._encode(prompts), seed))

    def reference(self) -> AbstractContextManager[Any]:
        """The SFT model."""
        return nullcontext(self.sft_model) if self.sft_model else adapter_off(self.model)

    def _encode(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        return [encode(self.tokenizer, prompt, None, self.params.prepare.prompt_format)[0] for prompt in prompts]

    def _generate(self, model: Any, ids: list[Tokens], seed: int) -> list[Tokens]:
        return generate(
            model,
            ids,
            response_length=self.params.ppo.response_length,
            temperature=self.params.ppo.temperature,
            generator=torch.Generator().manual_seed(seed),
            batch_size=BATCH,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _draws(self, responses: list[Tokens]) -> list[Draw]:
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [Draw(text, tokens[-1] == self.tokenizer.eos_token_id) for text, tokens in zip(texts, responses, strict=True)]
