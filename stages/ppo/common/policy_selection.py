"""Selects the policy to keep: the primary judge's best on held-out prompts, within the KL budget.

A later policy has to be better by more than the noise. The judge never rewards the policy, and the
policy is never trained on these prompts.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.saving import load_trainable, trainable_state_dict
from stages.lib.lm.scoring import score_responses
from stages.ppo.common.episodes import Episode


class TrainablePolicy(Protocol):
    """The policy being trained, with its reference model."""

    policy: Any
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response per prompt by the current policy."""
        ...

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the policy is as it was before training."""
        ...


class Validation(NamedTuple):
    """Results on the held-out prompts.

    judge_scores: (P,) by the primary judge; if it only compares, against the first validated
    policy, which is SFT. kl: mean from the reference, nats per sequence. gain: mean of the judge
    scores less those of the first validated policy; gain_error: its standard error.
    """

    update: int
    judge_scores: tuple[float, ...]
    kl: float
    gain: float
    gain_error: float

    @property
    def judge_score(self) -> float:
        """Mean over the prompts."""
        return fmean(self.judge_scores)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "validation_judge_score": self.judge_score,
            "validation_gain": self.gain,
            "validation_gain_z": self.gain / max(self.gain_error, 1e-8),
            "validation_kl": self.kl,
        }


NO_VALIDATION = Validation(0, (math.nan,), math.nan, math.nan, math.nan)


def paired_gain(new: Sequence[float], old: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences new - old, and its standard error (0 for a single difference).

    >>> paired_gain([1.0, 0.5], [0.0, 0.5])
    (0.5, 0.5)
    """
    gains = [a - b for a, b in zip(new, old, strict=True)]
    return fmean(gains), stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0


@dataclass
class PolicySelector:
    """Validates the current policy and remembers the best one.

    All policies respond to the same prompts with the same random numbers, so that they differ by
    their weights alone.

    Attributes:
        best: the validation of the best policy so far.
        weights: its trained weights.
        first_texts, first_scores: of the first validated policy, which is SFT.
    """

    roles: TrainablePolicy
    prompts: Sequence[Episode]
    judge: PrimaryJudge
    params: PpoParams
    seed: int
    best: Validation = NO_VALIDATION
    weights: dict[str, Tensor] = field(default_factory=dict)
    first_texts: list[str] = field(default_factory=list)
    first_scores: tuple[float, ...] = ()

    def validate(self, update: int) -> Validation:
        """Measure the policy after `update`; keep a copy of its weights if it is the best."""
        validation = self.measure(update)
        if not self.weights or self.is_better(validation):
            self.best = validation
            # cloned, since the next update changes the weights in place
            self.weights = {
                name: weight.clone()
                for name, weight in trainable_state_dict(self.roles.policy).items()
            }
        return validation

    def is_better(self, new: Validation) -> bool:
        """Whether a policy is better than the best so far.

        Within the KL budget: if the judge's mean gain over it exceeds one standard error. A policy
        beyond the budget loses to all within it, and to those with a smaller KL.
        """
        best_fits, new_fits = (kl <= self.params.max_kl for kl in (self.best.kl, new.kl))
        if new_fits and best_fits:
            gain, error = paired_gain(new.judge_scores, self.best.judge_scores)
            return gain > error
        return new_fits if new_fits != best_fits else new.kl < self.best.kl

    def measure(self, update: int) -> Validation:
        """Sample responses to the held-out prompts, and return their judge scores and KL."""
        p, tokenizer = self.params, self.roles.tokenizer
        prompt_ids = [tokens for _, tokens in self.prompts]
        generator = torch.Generator().manual_seed(self.seed)
        responses = self.roles.sample(prompt_ids, p, generator)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        response_scores = score_responses(
            self.roles.policy,
            self.roles.reference,
            prompt_ids,
            responses,
            eos_token_id=tokenizer.eos_token_id,
            temperature=p.temperature,
            batch_size=p.micro_batch_size,
        )
        prompts = [row["prompt"] for row, _ in self.prompts]
        self.first_texts = self.first_texts or texts
        judge_scores = tuple(self.judge.scores_against(prompts, texts, self.first_texts))
        self.first_scores = self.first_scores or judge_scores
        gain = paired_gain(judge_scores, self.first_scores)
        return Validation(update, judge_scores, float(response_scores.kl.mean()), *gain)

    def restore(self) -> None:
        """Give the policy the weights of the best one."""
        load_trainable(self.roles.policy, self.weights)

    def state(self) -> StateDict:
        return {
            "best": list(self.best),
            "weights": self.weights,
            "first_texts": self.first_texts,
            "first_scores": self.first_scores,
        }

    def load_state(self, state: StateDict) -> None:
        self.best, self.weights = Validation(*state["best"]), state["weights"]
        self.first_texts, self.first_scores = state["first_texts"], state["first_scores"]
