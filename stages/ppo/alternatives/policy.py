"""The policy being trained, with its reference: samples responses and scores them (reward, KL)."""

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
from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.data.prompts import decode
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.lib.lm.scoring import score_responses
from stages.lib.lm.vllm_engine import sampling_engine
from stages.ppo.common.episodes import Episode
from stages.ppo.common.outputs import rollout_rows
from stages.ppo.common.reference import reference_view
from stages.ppo.common.resume import Resume
from stages.ppo.common.reward_results import RewardInputs
from stages.ppo.common.rewards import Rewards


@dataclass(frozen=True)
class TrainingContext:
    """The inputs of every algorithm.

    resume: saves states in the folder with the rollouts and checkpoints of the run. saved: the
    state from which the run resumes. reference: hash of SFT's weights. sft: the SFT model, without
    adapters.
    rewards: further rewards. judge: the primary judge. prompts, held_out: to train on, to validate
    on.
    """

    params: Params
    recorder: MetricLogger
    resume: Resume
    saved: StateDict | None
    reference: str
    tokenizer: PreTrainedTokenizerBase
    sft: Any
    reward_model: Any
    rewards: Rewards
    judge: PrimaryJudge
    prompts: list[Episode]
    held_out: list[Episode]

    @property
    def work(self) -> Path:
        """Folder for the files of the run."""
        return self.resume.folder


class ScoredRollouts(NamedTuple):
    """The rollout rows of the responses whose rewards are known, and for each of the B responses
    the reward that PPO would be given, not rounded; None: a further reward failed.

    failed_share: share of the B responses without a reward.
    """

    rows: list[RolloutRow]
    rewards: list[float | None]
    failed_share: float


class TrainedPolicy:
    """A policy with its reference, which is the policy at the time when this object is made."""

    def __init__(self, policy: Any, context: TrainingContext) -> None:
        self.policy, self.context, self.tokenizer = policy, context, context.tokenizer
        self.view = reference_view(policy)
        self.engine = sampling_engine(context.params.model)

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the policy is as it was before training."""
        return self.view.reference()

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response per prompt by the current policy."""
        return sample_responses(
            self.policy, self.tokenizer, prompt_ids, ppo, generator, self.engine
        )

    def score(
        self, update: int, episodes: Sequence[Episode], responses: list[TokenIds]
    ) -> ScoredRollouts:
        """Score the policy's responses: reward model, further rewards, KL.

        Raises:
            RewardsFailed: too many further rewards failed.
        """
        context, ppo = self.context, self.context.params.ppo
        ends = end_tokens(self.policy, self.tokenizer)
        inputs = RewardInputs(
            [row for row, _ in episodes],
            decode(self.tokenizer, responses),
            [ends.end(response) for response in responses],
            [len(response) for response in responses],
        )
        further_rewards = context.rewards.start(inputs)  # servers work during the forward passes
        response_scores = score_responses(
            self.policy,
            self.reference,
            [tokens for _, tokens in episodes],
            responses,
            reward_model=context.reward_model,
            ends=ends,
            temperature=ppo.temperature,
        )
        results = further_rewards()
        results.check_share(ppo.max_failed_rewards)
        for failure in results.failures:
            context.recorder.log_progress(update, failure)
        kept = results.kept
        inputs = inputs.select(kept)
        ended, lengths = torch.tensor(inputs.ended), torch.tensor(inputs.lengths)
        calibrated = calibrate_scores(response_scores.scores[kept], context.reward_model)
        rewards = context.rewards.combine(ppo, calibrated, results.parts, ended, lengths)
        scored_rows = rollout_rows(
            update,
            inputs.rows,
            inputs.texts,
            scores=calibrated,
            parts=results.parts,
            rewards=rewards,
            judge_scores=context.judge.scores(inputs.prompts, inputs.texts),
            kls=response_scores.kl[kept],
            lengths=inputs.lengths,
            ended=ended,
        )
        known = dict(zip(kept, rewards.tolist(), strict=True))
        return ScoredRollouts(
            scored_rows,
            [known.get(index) for index in range(len(responses))],
            results.failed_share,
        )
