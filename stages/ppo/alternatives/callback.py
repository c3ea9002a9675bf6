"""How a policy learns, seen from beside the trainer: metrics of each update, validations,
checkpoints, rollouts.
"""

import math
import random
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerCallback

from stages.lib.core.errors import Diverged
from stages.lib.core.params.policy import OnDanger
from stages.lib.core.types import Row
from stages.lib.data.rollouts import RolloutLog
from stages.lib.lm.saving import save_trained
from stages.lib.metrics.sentiment import sentiment
from stages.ppo.alternatives import NUM_DESCRIBED_SAMPLES
from stages.ppo.alternatives.policy import TrainedPolicy, TrainingContext
from stages.ppo.common.health import Monitor, first_danger
from stages.ppo.common.policy_selection import PolicySelector, Validation

SHOWN = ("loss", "accuracy", "score_mean", "judge_mean", "kl", "response_length", "entropy")


class PolicyCallback(TrainerCallback):
    """`names`: ours by TRL's of the numbers that it logs. `steps`: optimiser steps an update.
    `stopped`: the sign that ended it early.
    """

    pupil: TrainedPolicy
    best: PolicySelector
    before: Validation
    first: list[Row]  # what SFT says

    def __init__(self, setting: TrainingContext, names: dict[str, str], steps: int = 1) -> None:
        self.setting, self.ppo = setting, setting.params.ppo
        self.names, self.steps, self.updates = names, steps, 0
        self.logs: list[dict[str, float]] = []  # of the update at hand
        self.monitor, self.stopped = Monitor(self.ppo, f"{setting.params.algorithm.value}.beta"), ""
        self.rollouts = RolloutLog(setting.work / "rollouts")
        shuffled = random.Random(setting.params.seed).sample(setting.prompts, len(setting.prompts))
        self.asked = shuffled[:NUM_DESCRIBED_SAMPLES]

    def begin(self, policy: Any) -> None:
        """The policy, before it has learnt anything."""
        self.pupil = TrainedPolicy(policy, self.setting)
        self.best = PolicySelector(
            self.pupil, self.setting.held_out, sentiment, self.ppo, self.setting.params.seed
        )
        self.before, self.first = self.best.validate(0), self.draw(0)

    def draw(self, update: int) -> list[Row]:
        """What the policy as it is says to the same training prompts, with the same random numbers;
        goes to the rollouts.
        """
        generator = torch.Generator().manual_seed(self.setting.params.seed)
        responses = self.pupil.sample([tokens for _, tokens in self.asked], self.ppo, generator)
        rows = self.pupil.score(update, self.asked, responses).rows
        self.rollouts.append(rows)
        return rows

    def describe(self) -> dict[str, float]:
        """What else is known of the update at hand."""
        return {}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """
        Raises:
            Diverged: the loss, the gradients or another number of TRL's is not finite.
        """
        if not logs or "loss" not in logs:  # what TRL says at its end
            return
        metrics = {
            ours: float(logs[theirs]) for theirs, ours in self.names.items() if theirs in logs
        }
        if bad := [ours for ours, value in metrics.items() if not math.isfinite(value)]:
            name = self.setting.params.algorithm.value
            raise Diverged(
                f"{name}, step {state.global_step}: {', '.join(bad)} not finite. Next: lower its learning rate (docs/algorithms.md)"
            )
        self.logs.append(metrics)
        if state.global_step % self.steps == 0:
            self.setting.recorder.total_steps = state.max_steps // self.steps
            self.updates += 1
            self.end_update(last=state.global_step == state.max_steps)
            control.should_training_stop |= bool(self.stopped)

    def end_update(self, last: bool) -> None:
        """As PPO's ends: what is wrong, how good the policy is where it is time to ask, what it
        was.
        """
        recorder = self.setting.recorder
        metrics = {
            name: fmean(each[name] for each in self.logs) for name in self.logs[0]
        } | self.describe()
        self.logs = []
        findings = self.monitor.read([*recorder.steps, {"step": self.updates, **metrics}])
        if self.ppo.on_danger is OnDanger.stop:
            self.stopped = first_danger(findings)
        if (last or self.updates % self.ppo.validation_updates == 0) and not self.stopped:
            validation = self.validate()
            metrics |= {"validation_judge": validation.judge, "validation_kl": validation.kl}
        shown = [name for name in metrics if name in SHOWN or name.startswith("validation")]
        recorder.log(self.updates, metrics, shown)
        for finding in findings:
            recorder.log_progress(self.updates, str(finding))
        if self.updates % self.ppo.save_updates == 0:
            folder = self.setting.work / "checkpoints" / f"step_{self.updates:05d}"
            save_trained(self.pupil.policy, self.setting.tokenizer, folder)

    def validate(self) -> Validation:
        """Without dropout, if there is any; TRL goes by the mode in which it finds the model."""
        self.pupil.policy.eval()
        validation = self.best.validate(self.updates)
        self.pupil.policy.train()
        return validation
