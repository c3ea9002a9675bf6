"""The policy to keep: best by a judge that PPO does not see, on prompts that it does not train on,
within the KL budget.
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
    """A policy as it learns, beside what it was."""

    policy: Any
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response a prompt by the policy as it is now."""
        ...

    def reference(self) -> AbstractContextManager[Any]:
        """The policy before it learnt."""
        ...


class Validation(NamedTuple):
    """Means over the held-out prompts: of the judge, and of KL from the reference in nats a
    sequence.
    """

    update: int
    judge: float
    kl: float


NO_VALIDATION = Validation(0, math.nan, math.nan)


@dataclass
class PolicySelector:
    """Measures the policy as it is, and remembers the best one; all answer the same prompts with
    the same random numbers.
    """

    roles: TrainablePolicy
    prompts: Sequence[Episode]
    judge: ScoreFunction
    params: PpoParams
    seed: int
    found: Validation = NO_VALIDATION
    weights: dict[str, Tensor] = field(default_factory=dict)

    def validate(self, update: int) -> Validation:
        measured = self.measure(update)
        if not self.weights or self.rank(measured) > self.rank(self.found):
            self.found = measured
            self.weights = {
                name: weight.clone()
                for name, weight in trainable_state_dict(self.roles.policy).items()
            }
        return measured

    def rank(self, validation: Validation) -> tuple[bool, float]:
        within = validation.kl <= self.params.max_kl
        return within, validation.judge if within else -validation.kl

    def measure(self, update: int) -> Validation:
        p, tokenizer, policy = self.params, self.roles.tokenizer, self.roles.policy
        ids = [tokens for _, tokens in self.prompts]
        responses = self.roles.sample(ids, p, torch.Generator().manual_seed(self.seed))
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        told = score_responses(
            policy,
            self.roles.reference,
            ids,
            responses,
            eos_token_id=tokenizer.eos_token_id,
            temperature=p.temperature,
            batch_size=p.micro_batch_size,
        )
        return Validation(
            update,
            fmean(self.judge([row["prompt"] for row, _ in self.prompts], texts)),
            float(told.kl.mean()),
        )

    def restore(self) -> None:
        load_trainable(self.roles.policy, self.weights)

    def state(self) -> StateDict:
        return {"found": list(self.found), "weights": self.weights}

    def load_state(self, state: StateDict) -> None:
        self.found, self.weights = Validation(*state["found"]), state["weights"]
