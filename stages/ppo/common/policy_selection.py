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
from stages.lib.core.progress import progress
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.saving import load_trainable, trainable_state_dict
from stages.lib.lm.scoring import score_responses
from stages.lib.metrics.stats import ratio_of_sums
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
    policy, which is SFT. kl: mean from the reference, nats per sequence. kl_per_token: nats, with
    its standard error. gain: mean of the judge
    scores less those of the first validated policy; gain_error: its standard error.
    """

    update: int
    judge_scores: tuple[float, ...]
    kl: float
    kl_per_token: float
    kl_per_token_se: float
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
            "validation_kl_per_token": self.kl_per_token,
            "validation_kl_per_token_se": self.kl_per_token_se,
        }


NO_VALIDATION = Validation(0, (math.nan,), *[math.nan] * 5)


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
        first: the first validation, which is of SFT.
        first_texts: the responses of SFT.
    """

    roles: TrainablePolicy
    prompts: Sequence[Episode]
    judge: PrimaryJudge
    params: PpoParams
    seed: int
    best: Validation = NO_VALIDATION
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: Validation = NO_VALIDATION
    first_texts: list[str] = field(default_factory=list)

    def validate(self, update: int) -> Validation:
        """Measure the policy after `update`; keep a copy of its weights if it is the best."""
        with progress("validation"):
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
        beyond the budget loses to all within it, and to those with a smaller KL. The budget holds
        for a KL of one standard error more, since it is measured on a few prompts.
        """
        best_fits, new_fits = (
            validation.kl_per_token + validation.kl_per_token_se <= self.params.max_kl_per_token
            for validation in (self.best, new)
        )
        if new_fits and best_fits:
            gain, error = paired_gain(new.judge_scores, self.best.judge_scores)
            return gain > error
        return new_fits if new_fits != best_fits else new.kl_per_token < self.best.kl_per_token

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
            ends=end_tokens(self.roles.policy, tokenizer),
            temperature=p.temperature,
        )
        prompts = [row["prompt"] for row, _ in self.prompts]
        reference_texts = self.first_texts or texts
        scores = tuple(self.judge.scores_against(prompts, texts, reference_texts))
        gain = paired_gain(scores, self.first.judge_scores if self.first_texts else scores)
        kls = response_scores.kl.tolist()
        kl_per_token = ratio_of_sums(kls, [len(response) for response in responses])
        validation = Validation(update, scores, fmean(kls), *kl_per_token, *gain)
        if not self.first_texts:
            self.first, self.first_texts = validation, texts
        return validation

    def restore(self) -> None:
        """Give the policy the weights of the best one."""
        load_trainable(self.roles.policy, self.weights)

    def state(self) -> StateDict:
        return {
            "best": list(self.best),
            "weights": self.weights,
            "first_texts": self.first_texts,
            "first": list(self.first),
        }

    def load_state(self, state: StateDict) -> None:
        self.best, self.weights = Validation(*state["best"]), state["weights"]
        self.first, self.first_texts = Validation(*state["first"]), state["first_texts"]
