"""A policy that another trainer than ours trains: its validations, health, rollouts and samples."""

import random
from typing import Any

import torch

from stages.lib.core.rows import RolloutRow
from stages.lib.data.rollouts import RolloutLog
from stages.lib.lm import world
from stages.ppo.alternatives import NUM_DESCRIBED_SAMPLES
from stages.ppo.alternatives.policy import TrainedPolicy, TrainingContext
from stages.ppo.common.health import Monitor
from stages.ppo.common.policy_selection import PolicySelector


class PolicyRun:
    """The policy during a run, and what is known about it.

    Args:
        context: what the training starts from.
        kl_key: the key of params.yaml that holds the policy near the reference.

    Attributes:
        saved: the state from which the run resumes.
        updates: the number of updates that the policy has had.
        selector: remembers the best policy so far.
        initial_rows: rollout rows of the policy before training, which is SFT.
    """

    trained_policy: TrainedPolicy
    selector: PolicySelector
    initial_rows: list[RolloutRow]

    def __init__(self, context: TrainingContext, kl_key: str) -> None:
        self.context, self.ppo = context, context.params.ppo
        self.saved = saved = context.saved
        self.updates = saved["updates"] if saved else 0
        self.monitor = Monitor(self.ppo, kl_key)
        position = saved["rollouts"] if saved else (1, 0)
        self.rollouts = RolloutLog(context.work / "rollouts", position, writes=world.is_main())
        shuffled = random.Random(context.params.seed).sample(context.prompts, len(context.prompts))
        self.described_prompts = shuffled[:NUM_DESCRIBED_SAMPLES]

    def begin(self, policy: Any) -> None:
        """Validate and describe the policy before training."""
        self.use(policy)
        self.selector.validate(0)
        self.monitor.rounding = self.selector.rounding
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
