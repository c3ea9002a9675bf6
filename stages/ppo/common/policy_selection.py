"""Selects the policy to keep: the judge's best on held-out prompts, within the KL budget.

The judge never rewards the policy, and the policy is never trained on these prompts.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import ScoreFunction, StateDict, TokenIds
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
    """Means over the held-out prompts. kl: from the reference, nats per sequence."""

    update: int
    sentiment: float
    kl: float

    @property
    def metrics(self) -> dict[str, float]:
        return {"validation_sentiment": self.sentiment, "validation_kl": self.kl}


NO_VALIDATION = Validation(0, math.nan, math.nan)


@dataclass
class PolicySelector:
    """Validates the current policy and remembers the best one.

    All policies respond to the same prompts with the same random numbers, so that they differ by
    their weights alone.

    Attributes:
        best: the validation of the best policy so far.
        weights: its trained weights.
    """

    roles: TrainablePolicy
    prompts: Sequence[Episode]
    judge: ScoreFunction
    params: PpoParams
    seed: int
    best: Validation = NO_VALIDATION
    weights: dict[str, Tensor] = field(default_factory=dict)

    def validate(self, update: int) -> Validation:
        """Measure the policy after `update`; keep a copy of its weights if it is the best."""
        validation = self.measure(update)
        if not self.weights or self.rank(validation) > self.rank(self.best):
            self.best = validation
            # cloned, since the next update changes the weights in place
            self.weights = {
                name: weight.clone()
                for name, weight in trainable_state_dict(self.roles.policy).items()
            }
        return validation

    def rank(self, validation: Validation) -> tuple[bool, float]:
        """Sort key: within the KL budget by sentiment; all others below, by how small KL is."""
        within_budget = validation.kl <= self.params.max_kl
        return within_budget, validation.sentiment if within_budget else -validation.kl

    def measure(self, update: int) -> Validation:
        """Sample responses to the held-out prompts, and return their mean judge score and KL."""
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
        judge_scores = self.judge([row["prompt"] for row, _ in self.prompts], texts)
        return Validation(update, fmean(judge_scores), float(response_scores.kl.mean()))

    def restore(self) -> None:
        """Give the policy the weights of the best one."""
        load_trainable(self.roles.policy, self.weights)

    def state(self) -> StateDict:
        return {"best": list(self.best), "weights": self.weights}

    def load_state(self, state: StateDict) -> None:
        self.best, self.weights = Validation(*state["best"]), state["weights"]
