"""A policy that another trainer than ours trains: its inputs, samples, scores, and its run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import StateDict
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.vllm_engine import sampling_engine
from stages.ppo.common.episodes import Episode
from stages.ppo.common.health import Monitor
from stages.ppo.common.outputs import rollout_rows
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.reference import SampledPolicy
from stages.ppo.common.resume import Resume
from stages.ppo.common.rewards import RewardInputs, Rewards
from stages.ppo.common.run import Run

NUM_DESCRIBED_SAMPLES = 256  # responses, at most, that describe a policy before and after training


@dataclass(frozen=True)
class TrainingContext:
    """The inputs of every algorithm."""

    params: Params
    recorder: MetricLogger
    resume: Resume  # saves states in the folder with the rollouts and checkpoints of the run
    saved: StateDict | None  # from which the run resumes
    reference: str  # hash of SFT's weights
    tokenizer: PreTrainedTokenizerBase
    sft: Any  # without adapters
    reward_model: Any
    rewards: Rewards  # further rewards
    judge: PrimaryJudge  # the primary one
    prompts: list[Episode]  # to train on
    held_out: list[Episode]  # to validate on

    @property
    def work(self) -> Path:
        """Folder for the files of the run."""
        return self.resume.folder


class ScoredRollouts(NamedTuple):
    """Scores of B responses."""

    rows: list[RolloutRow]  # of the responses whose rewards are known
    rewards: list[float | None]  # that PPO would be given, not rounded; None: a further one failed


class TrainedPolicy(SampledPolicy):
    """A policy with its reference, which is the policy at the time when this object is made."""

    def __init__(self, policy: Any, context: TrainingContext) -> None:
        super().__init__(policy, context.tokenizer, sampling_engine(context.params.model))
        self.context = context

    def score(
        self, update: int, episodes: Sequence[Episode], responses: list[Response]
    ) -> ScoredRollouts:
        """Score the policy's responses: reward model, further rewards, KL.

        Raises:
            RewardsFailed: too many further rewards failed.
        """
        context, ppo = self.context, self.context.params.ppo
        inputs = RewardInputs([row for row, _ in episodes], responses)
        further_rewards = context.rewards.start(inputs)  # servers work during the forward passes
        scored = score_responses(
            responses,
            self.policy,
            self.reference,
            self.tokenizer,
            reward_model=context.reward_model,
            temperature=ppo.temperature,
        )
        results = further_rewards()
        results.check_share(ppo.max_failed_rewards)
        for failure in results.failures:
            context.recorder.log_progress(update, failure)
        kept = results.kept
        inputs = inputs.select(kept)
        ended, lengths = torch.tensor(inputs.ended), torch.tensor(inputs.lengths)
        calibrated = torch.tensor([scored[i].score for i in kept])
        rewards = context.rewards.combine(ppo, calibrated, results.parts, ended, lengths)
        scored_rows = rollout_rows(
            update,
            inputs,
            scores=calibrated,
            parts=results.parts,
            rewards=rewards,
            judge_scores=context.judge.scores(inputs.prompts, inputs.texts),
            kls=torch.tensor([scored[i].kl for i in kept]),
        )
        known = dict(zip(kept, rewards.tolist(), strict=True))
        return ScoredRollouts(scored_rows, [known.get(index) for index in range(len(responses))])


class PolicyRun(Run):
    """The policy during a run, and what is known about it.

    Args:
        context: what the training starts from.
        kl_key: the key of params.yaml that holds the policy near the reference.

    Attributes:
        saved: the state from which the run resumes.
        updates: the number of updates that the policy has had.
        initial_rows: rollout rows of the policy before training, which is SFT.
    """

    trained_policy: TrainedPolicy
    initial_rows: list[RolloutRow]

    def __init__(self, context: TrainingContext, kl_key: str) -> None:
        self.context, self.ppo = context, context.params.ppo
        self.recorder, self.work = context.recorder, context.work
        self.saved = saved = context.saved
        self.updates = saved["updates"] if saved else 0
        self.monitor = Monitor(self.ppo, kl_key)
        self.open_rollouts(saved)
        shuffled = random.Random(context.params.seed).sample(context.prompts, len(context.prompts))
        self.described_prompts = shuffled[:NUM_DESCRIBED_SAMPLES]

    def begin(self, policy: Any) -> None:
        """Validate and describe the policy before training."""
        self.use(policy)
        self.validate_first()
        self.initial_rows = self.sample_rows(0)

    def use(self, policy: Any) -> None:
        """Take a policy as the one that is trained; its reference is what it is now."""
        self.trained_policy = TrainedPolicy(policy, self.context)
        self.selector = PolicySelector(
            self.trained_policy,
            self.context.held_out,
            self.context.judge,
            self.ppo,
            self.context.params.seed,
        )

    def sample_rows(self, update: int) -> list[RolloutRow]:
        """Rollout rows of the current policy, which also go to the rollout files.

        The training prompts and the random numbers are the same at each call.
        """
        generator = torch.Generator().manual_seed(self.context.params.seed)
        prompt_ids = [tokens for _, tokens in self.described_prompts]
        responses = self.trained_policy.sample(prompt_ids, self.ppo, generator)
        rows = self.trained_policy.score(update, self.described_prompts, responses).rows
        self.rollouts.append(rows)
        return rows
