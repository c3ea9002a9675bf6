"""Responses of the policy and of SFT on training prompts, with the reward model's scores."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.generation import Tokens, generate, reward_scores, token_logprobs
from stages.models import load_causal_lm, load_reward_model, load_tokenizer
from stages.params import Params
from stages.prompts import Prompt, encode
from stages.records import stage_dir

BATCH = 64


@dataclass(frozen=True)
class Draw:
    """One response. score: calibrated. kl: policy from SFT, nats a sequence (0 for SFT's own). ended: EOS was sampled."""

    text: str
    score: float
    kl: float
    ended: bool


class Scorer:
    """Calibrated scores of whole responses (with EOS) under a reward model."""

    def __init__(self, path: Path, tokenizer: Any, params: Params) -> None:
        self.model, self.tokenizer, self.params = load_reward_model(path, params.model), tokenizer, params

    def tokens(self, sequences: Sequence[Tokens]) -> list[float]:
        raw = reward_scores(self.model, sequences, batch_size=BATCH, pad_token_id=self.tokenizer.pad_token_id)
        scores: list[float] = ((raw - self.model.config.mean) / self.model.config.std).tolist()
        return scores

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        encoded = (encode(self.tokenizer, p, r, self.params.prepare.prompt_format) for p, r in zip(prompts, responses, strict=True))
        return self.tokens([prompt + response for prompt, response in encoded])


class Sampler:
    """The policy, and with its adapter off the SFT model; each call has a random stream of its own."""

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.params, self.tokenizer = params, load_tokenizer(sft)
        self.model = load_causal_lm(sft, params.model, stage_dir(round_, "ppo") / "policy")
        self.scorer = Scorer(stage_dir(round_, "reward") / "model", self.tokenizer, params)

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[Draw]:
        return self._draw(prompts, seed, adapter=True)

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[Draw]:
        return self._draw(prompts, seed, adapter=False)

    def _draw(self, prompts: Sequence[Prompt], seed: int, adapter: bool) -> list[Draw]:
        p, tokenizer = self.params, self.tokenizer
        ids = [encode(tokenizer, prompt, None, p.prepare.prompt_format)[0] for prompt in prompts]
        with nullcontext() if adapter else self.model.disable_adapter():
            responses = generate(
                self.model,
                ids,
                response_length=p.ppo.response_length,
                temperature=p.ppo.temperature,
                generator=torch.Generator().manual_seed(seed),
                batch_size=BATCH,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        kl = self._kl(ids, responses) if adapter else [0.0] * len(ids)
        scores = self.scorer.tokens([a + b for a, b in zip(ids, responses, strict=True)])
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        ended = [tokens[-1] == tokenizer.eos_token_id for tokens in responses]
        return [Draw(*row) for row in zip(texts, scores, kl, ended, strict=True)]

    def _kl(self, ids: list[Tokens], responses: list[Tokens]) -> list[float]:
        def logprobs() -> list[torch.Tensor]:
            pad, temperature = self.tokenizer.pad_token_id, self.params.ppo.temperature
            return token_logprobs(self.model, ids, responses, temperature=temperature, batch_size=BATCH, pad_token_id=pad)

        own = logprobs()
        with self.model.disable_adapter():
            reference = logprobs()
        return [float((a - b).sum()) for a, b in zip(own, reference, strict=True)]
