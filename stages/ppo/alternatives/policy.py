"""A policy that learns, beside the SFT model that it was and the reward model: what it says, and
what they say of that.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import Row, TokenIds
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.lib.lm.scoring import score_responses
from stages.ppo.common.episodes import Episode
from stages.ppo.common.outputs import rollout_rows
from stages.ppo.common.reference import reference_view
from stages.ppo.common.rewards import Rewards

BATCH = 128  # responses at once


@dataclass(frozen=True)
class TrainingContext:
    """What every algorithm starts from. sft: the model, without adapters. prompts, held_out: to
    learn from, to validate on.
    """

    params: Params
    recorder: MetricLogger
    work: Path
    tokenizer: PreTrainedTokenizerBase
    sft: Any
    reward_model: Any
    rewards: Rewards
    prompts: list[Episode]
    held_out: list[Episode]


class ScoredRollouts(NamedTuple):
    """Of B responses: rows of rollouts, and the rewards that PPO would be given, not rounded."""

    rows: list[Row]
    rewards: list[float]


class TrainedPolicy:
    """`policy` must not have learnt yet: what it is now is the reference."""

    def __init__(self, policy: Any, setting: TrainingContext) -> None:
        self.policy, self.setting, self.tokenizer = policy, setting, setting.tokenizer
        self.trunk = reference_view(policy)

    def reference(self) -> AbstractContextManager[Any]:
        return self.trunk.reference()

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response a prompt by the policy as it is now."""
        return sample_responses(self.policy, self.tokenizer, prompt_ids, ppo, generator, BATCH)

    def score(
        self, update: int, episodes: Sequence[Episode], responses: list[TokenIds]
    ) -> ScoredRollouts:
        """The policy's responses with their scores, rewards and KL."""
        ppo, eos, rewards = (
            self.setting.params.ppo,
            self.tokenizer.eos_token_id,
            self.setting.rewards,
        )
        told = score_responses(
            self.policy,
            self.reference,
            [tokens for _, tokens in episodes],
            responses,
            reward_model=self.setting.reward_model,
            eos_token_id=eos,
            temperature=ppo.temperature,
            batch_size=BATCH,
        )
        rows, texts = (
            [row for row, _ in episodes],
            self.tokenizer.batch_decode(responses, skip_special_tokens=True),
        )
        scores, parts = (
            calibrate_scores(told.scores, self.setting.reward_model),
            rewards([row["prompt"] for row in rows], texts),
        )
        ended, lengths = (
            torch.tensor([r[-1] == eos for r in responses]),
            [len(r) for r in responses],
        )
        total = rewards.combine(ppo, scores, parts, ended, torch.tensor(lengths))
        made = rollout_rows(
            update,
            rows,
            texts,
            scores=scores,
            parts=parts,
            rewards=total,
            kls=told.kl,
            lengths=lengths,
            ended=ended,
        )
        return ScoredRollouts(made, total.tolist())
