"""A TRL callback: metrics, health, validation, checkpoints and resume state of a run."""

import math
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from stages.lib.core.errors import Diverged
from stages.lib.core.params.policy import OfflineParams
from stages.lib.core.params.shared import TrainParams
from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.saving import load_trainable, trainable_state_dict
from stages.lib.training.trl_setup import SharedTraining, run_trainer, trainer_arguments
from stages.ppo.alternatives.stage import PolicyRun, TrainingContext
from stages.ppo.common.reference import check_reference_weights
from stages.ppo.common.resume import random_state, set_random_state


class PolicyCallback(PolicyRun, TrainerCallback):
    """Follows a policy while one of TRL's trainers trains it. An update is an optimizer step.

    Args:
        context: what the training starts from.
        names: the metrics to keep, by the names under which TRL logs them.

    Attributes:
        ended: whether the last update is done, or a danger has ended the run.
    """

    def __init__(self, context: TrainingContext, names: dict[str, str]) -> None:
        self.algorithm = context.params.algorithm.value
        super().__init__(context, f"{self.algorithm}.beta")
        self.names = names
        self.ended: bool = self.saved["ended"] if self.saved else False
        self.epoch_random_state: StateDict = {}

    def begin(self, policy: Any) -> None:
        """Validate and describe the policy before training; or load the saved state."""
        if self.saved:
            self.use(policy)
            self.load_state(self.saved)
        else:
            super().begin(policy)

    def train(self, trainer: SharedTraining) -> None:
        """Run TRL's trainer, from its checkpoint if this run resumes; not if that had ended."""
        if not self.ended:
            folder = Path(trainer.args.output_dir)
            checkpoint = folder / self.saved["checkpoint"] if self.saved else None
            run_trainer(trainer, checkpoint)

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
        self.recorder.total_steps = state.max_steps
        self.updates += 1
        last = state.global_step == state.max_steps
        self.end_update(self.updates, metrics, last)
        control.should_training_stop |= bool(self.monitor.stopped)
        self.ended = last or bool(self.monitor.stopped)
        due = self.ended or self.updates % self.ppo.resume_updates == 0
        control.should_save = due and world.is_main()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the random state from which the order of the data is drawn next."""
        if self.saved and not self.epoch_random_state:
            set_random_state(self.saved["epoch_random_state"])
        self.epoch_random_state = random_state()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the resume state, which names the trainer's own checkpoint, saved before it."""
        # an epoch that is complete is not run again: the next one begins with today's state
        complete = float(state.epoch).is_integer()
        epoch = random_state() if complete else self.epoch_random_state
        name = f"checkpoint-{state.global_step}"
        self.context.resume.save(self.state() | {"checkpoint": name, "epoch_random_state": epoch})
        # not before: a kill in between would leave a state whose checkpoint is gone
        for folder in Path(args.output_dir).glob("checkpoint-*"):
            if folder.name != name:
                shutil.rmtree(folder)

    def state(self) -> StateDict:
        """What the rest of the run and its outputs depend on, beside the trainer's checkpoint."""
        return {
            "updates": self.updates,
            "ended": self.ended,
            "reference": self.context.reference,
            "rewards": self.context.rewards.state(),
            "weights": trainable_state_dict(self.trained_policy.policy),
            "selector": self.selector.state(),
            "steps": self.recorder.steps,
            "rollouts": self.rollouts.position,
            "initial_rows": self.initial_rows,
        }

    def load_state(self, state: StateDict) -> None:
        """Continue from a state, whose metrics and rollouts the logs already contain.

        Raises:
            RondoError: the reference has other weights than the one of the state.
        """
        with self.trained_policy.reference() as model:
            check_reference_weights(model, state["reference"], "after the resume")
        self.context.rewards.load_state(state["rewards"])
        # weights are removed from the state, which lasts as long as the run
        load_trainable(self.trained_policy.policy, state.pop("weights"))
        self.initial_rows = state["initial_rows"]
        self.resume_log(self.updates, state.pop("selector"))


def offline_arguments(
    context: TrainingContext, section: OfflineParams, max_length: int
) -> dict[str, Any]:
    """Arguments of TRL's trainer for an algorithm that trains on texts of at most `max_length`
    tokens.
    """
    params = context.params
    train = TrainParams(
        **section.model_dump(include=set(OfflineParams.model_fields)),
        max_steps=params.ppo.max_steps,
        gradient_checkpointing=params.ppo.gradient_checkpointing,
        max_length=max_length,
    )
    return trainer_arguments(train, params.model, params.seed, context.work, continues=False)
