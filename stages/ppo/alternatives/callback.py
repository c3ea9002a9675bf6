"""A TRL callback: metrics, health, validation, checkpoints and rollouts of a training run."""

import math
import random
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerCallback

from stages.lib.core.errors import Diverged
from stages.lib.core.rows import RolloutRow
from stages.lib.data.rollouts import RolloutLog
from stages.lib.lm.saving import save_trained
from stages.ppo.alternatives import NUM_DESCRIBED_SAMPLES
from stages.ppo.alternatives.policy import TrainedPolicy, TrainingContext
from stages.ppo.common.health import Monitor
from stages.ppo.common.policy_selection import PolicySelector, Validation

SHOWN = ("loss", "accuracy", "score_mean", "judge_score_mean", "kl", "response_length", "entropy")


class PolicyCallback(TrainerCallback):
    """Follows a policy while one of TRL's trainers trains it.

    Args:
        context: what the training starts from.
        names: the metrics to keep, by the names under which TRL logs them.
        steps: optimizer steps per update.

    Attributes:
        selector: remembers the best policy so far.
        initial_rows: rollout rows of the policy before training, which is SFT.
    """

    trained_policy: TrainedPolicy
    selector: PolicySelector
    initial_rows: list[RolloutRow]

    def __init__(self, context: TrainingContext, names: dict[str, str], steps: int = 1) -> None:
        self.context, self.ppo = context, context.params.ppo
        self.algorithm = context.params.algorithm.value
        self.names, self.steps, self.updates = names, steps, 0
        self.logs: list[dict[str, float]] = []  # of the current update, one per optimizer step
        self.monitor = Monitor(self.ppo, f"{self.algorithm}.beta")
        self.rollouts = RolloutLog(context.work / "rollouts")
        shuffled = random.Random(context.params.seed).sample(context.prompts, len(context.prompts))
        self.described_prompts = shuffled[:NUM_DESCRIBED_SAMPLES]

    def begin(self, policy: Any) -> None:
        """Validate and describe the policy before training."""
        self.trained_policy = TrainedPolicy(policy, self.context)
        self.selector = PolicySelector(
            self.trained_policy,
            self.context.held_out,
            self.context.judge,
            self.ppo,
            self.context.params.seed,
        )
        self.selector.validate(0)
        self.initial_rows = self.sample_rows(0)

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

    def describe(self) -> dict[str, float]:
        """Further metrics of the current update; none here."""
        return {}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """
        Raises:
            Diverged: the loss, the gradients or another metric of TRL's is not finite.
        """
        if not logs or "loss" not in logs:  # TRL's summary at the end of training
            return
        metrics = {
            name: float(logs[logged_name])
            for logged_name, name in self.names.items()
            if logged_name in logs
        }
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise Diverged(
                f"{self.algorithm}, step {state.global_step}: {', '.join(bad)} not finite. "
                "Next: lower its learning rate (docs/algorithms.md)"
            )
        self.logs.append(metrics)
        if state.global_step % self.steps == 0:
            self.context.recorder.total_steps = state.max_steps // self.steps
            self.updates += 1
            self.end_update(last=state.global_step == state.max_steps)
            control.should_training_stop |= bool(self.monitor.stopped)

    def end_update(self, last: bool) -> None:
        """Health, validation if it is due, metrics and checkpoint, as after an update of PPO."""
        recorder = self.context.recorder
        means = {name: fmean(log[name] for log in self.logs) for name in self.logs[0]}
        metrics = means | self.describe()
        self.logs = []
        step = {"step": self.updates, **metrics}
        findings = self.monitor.check([*recorder.steps, step])
        due = last or self.updates % self.ppo.validation_updates == 0
        if due and not self.monitor.stopped:
            validation = self.validate().metrics
            metrics |= validation
            findings += self.monitor.check([*recorder.steps, step | validation])
        shown = [name for name in metrics if name in SHOWN or name.startswith("validation")]
        recorder.log(self.updates, metrics, shown)
        for finding in findings:
            recorder.log_progress(self.updates, str(finding))
        if self.updates % self.ppo.save_updates == 0:
            folder = self.context.work / "checkpoints" / f"step_{self.updates:05d}"
            save_trained(self.trained_policy.policy, self.context.tokenizer, folder)

    def validate(self) -> Validation:
        """Validate in eval mode, then return to train mode, on which TRL's trainers rely."""
        self.trained_policy.policy.eval()
        validation = self.selector.validate(self.updates)
        self.trained_policy.policy.train()
        return validation
