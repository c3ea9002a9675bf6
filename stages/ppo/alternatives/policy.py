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
from stages.lib.core.recorder import Recorder
from stages.lib.core.types import Row, Tokens
from stages.lib.lm.generation import sample
from stages.lib.lm.reward_ensemble import calibrated
from stages.lib.lm.scoring import assess
from stages.ppo.common.episodes import Episode
from stages.ppo.common.outputs import rollout_rows
from stages.ppo.common.reference import trunk_of
from stages.ppo.common.rewards import Rewards

BATCH = 128  # responses at once


@dataclass(frozen=True)
class Setting:
    """What every algorithm starts from. sft: the model, without adapters. prompts, held_out: to
    learn from, to validate on.
    """

    params: Params
    recorder: Recorder
    work: Path
    tokenizer: PreTrainedTokenizerBase
    sft: Any
    reward_model: Any
    rewards: Rewards
    prompts: list[Episode]
    held_out: list[Episode]


class Told(NamedTuple):
    """Of B responses: rows of rollouts, and the rewards that PPO would be given, not rounded."""

    rows: list[Row]
    rewards: list[float]


class Pupil:
    """`policy` must not have learnt yet: what it is now is the reference."""

    def __init__(self, policy: Any, setting: Setting) -> None:
        self.policy, self.setting, self.tokenizer = policy, setting, setting.tokenizer
        self.trunk = trunk_of(policy)

    def reference(self) -> AbstractContextManager[Any]:
        return self.trunk.reference()

    def sample(
        self, prompt_ids: list[Tokens], ppo: PpoParams, generator: torch.Generator
    ) -> list[Tokens]:
        """One response a prompt by the policy as it is now."""
        return sample(self.policy, self.tokenizer, prompt_ids, ppo, generator, BATCH)

    def tell(self, update: int, episodes: Sequence[Episode], responses: list[Tokens]) -> Told:
        """The policy's responses with their scores, rewards and KL."""
        ppo, eos, rewards = (
            self.setting.params.ppo,
            self.tokenizer.eos_token_id,
            self.setting.rewards,
        )
        told = assess(
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
            calibrated(told.scores, self.setting.reward_model),
            rewards([row["prompt"] for row in rows], texts),
        )
        ended, lengths = (
            torch.tensor([r[-1] == eos for r in responses]),
            [len(r) for r in responses],
        )
        total = rewards.total(ppo, scores, parts, ended, torch.tensor(lengths))
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
        return Told(made, total.tolist())
