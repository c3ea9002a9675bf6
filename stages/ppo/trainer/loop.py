"""A run of an online algorithm: update after update, with health monitor, validation, checkpoints
and resume state.
"""

from collections.abc import Sequence

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.policy import LossLevel, PpoParams
from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import Metrics, StateDict
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import world
from stages.lib.lm.saving import weights_hash
from stages.ppo.common.episodes import Episode
from stages.ppo.common.health import Monitor, Rounding
from stages.ppo.common.outputs import describe_texts, rollout_rows
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.reference import check_reference_weights
from stages.ppo.common.resume import random_state, set_random_state
from stages.ppo.common.rewards import RewardInputs
from stages.ppo.common.run import Run, open_run
from stages.ppo.trainer.rollout import Rollout
from stages.ppo.trainer.update import PpoTrainer


class TrainingRun(Run):
    """A run from its first update, or from the saved state of a killed run.

    Attributes:
        reference: hash of the reference's weights, which must stay the same until the end.
    """

    def __init__(
        self,
        trainer: PpoTrainer,
        held_out: Sequence[Episode],
        params: Params,
        round_: str,
        identity: Metrics,
    ) -> None:
        self.trainer, self.ppo = trainer, params.ppo
        self.judge = load_primary_judge(params, round_)
        self.selector = PolicySelector(trainer.roles, held_out, self.judge, self.ppo, params.seed)
        self.monitor = Monitor(self.ppo, trainer.algorithm.kl_key)
        with trainer.roles.reference() as reference:
            self.reference = weights_hash(reference)
        self.resume, saved, self.recorder = open_run(
            round_, identity, trainer.planned_updates, mapped=trainer.roles.sharded
        )
        self.work = self.resume.folder
        self.open_rollouts(saved)
        if saved:
            self.load_state(saved)

    def train(self) -> None:
        """Run all updates, until the last one or until a danger stops the run."""
        trainer = self.trainer
        if not trainer.updates:
            if not trainer.roles.starts_as_reference:
                self.selector.validate_reference()
            self.validate_first()
            trainer.sft_length = self.selector.first.length
            if trainer.algorithm.has_critic:  # RLOO and GRPO have no ratio per 1 / length
                check_clip_range(self.ppo, self.selector.rounding)
                warm_up_critic(trainer, self.selector)
        while trainer.updates < trainer.planned_updates and not self.monitor.stopped:
            # 1. update the policy, keep the rollout
            rollout, metrics = trainer.step()
            rows = self.episode_rows(rollout, metrics["kl_coef"])
            self.rollouts.append(rows)
            metrics |= describe_texts(rows)
            for failure in rollout.failures:
                self.recorder.log_progress(trainer.updates, failure)
            del rollout  # its states would stay in memory while the next ones are computed

            # 2. health, validation, metrics, checkpoint
            self.end_update(trainer.updates, metrics, trainer.updates == trainer.planned_updates)

            # 3. the state, which covers all of the above
            ended = trainer.updates == trainer.planned_updates or self.monitor.stopped
            if trainer.updates % self.ppo.resume_updates == 0 or ended:
                state = self.state()  # all processes give their parts of sharded models
                if world.is_main():
                    self.resume.save(state)
        self.check_reference(self.reference, "after the last update")

    def episode_rows(self, rollout: Rollout, kl_coef: float) -> list[RolloutRow]:
        """One row per episode; kl_cost: score units that its KL cost it."""
        inputs, kls = RewardInputs(rollout.rows, rollout.responses), rollout.sequence_kl
        rows = rollout_rows(
            self.trainer.updates,
            inputs,
            scores=rollout.calibrated,
            parts=rollout.parts,
            rewards=rollout.scores,
            judge_scores=self.judge.scores(inputs.prompts, inputs.texts),
            kls=kls,
        )
        if not self.trainer.algorithm.kl_in_loss:
            for row, kl in zip(rows, kls.tolist(), strict=True):
                row["kl_cost"] = round(kl_coef * kl, 4)
        return rows

    def check_reference(self, expected: str, when: str) -> None:
        """
        Raises:
            RondoError: the hash of the reference's weights is not `expected`.
        """
        with self.trainer.roles.reference() as reference:
            check_reference_weights(reference, expected, when)

    def state(self) -> StateDict:
        """Everything that the rest of the run and its outputs depend on, for `load_state`."""
        return {
            "reference": self.reference,
            "trainer": self.trainer.state(),
            "random": random_state(),
            "selector": self.selector.state(),
            "steps": self.recorder.steps,
            "rollouts": self.rollouts.position,
        }

    def load_state(self, state: StateDict) -> None:
        """Continue from a state, whose metrics and rollouts the logs already contain.

        Raises:
            RondoError: the reference has other weights than the one of the state.
        """
        self.check_reference(state["reference"], "after the resume")
        self.trainer.load_state(state["trainer"])
        set_random_state(state["random"])
        self.resume_log(self.trainer.updates, state["selector"])


def warm_up_critic(trainer: PpoTrainer, selector: PolicySelector) -> None:
    """Fit the critic to the responses of the selector's first validation."""
    if trainer.params.critic_warmup_epochs:
        passes = len(selector.responses) // len(selector.prompts)
        trainer.fit_critic([*selector.prompts] * passes, selector.responses)


def check_clip_range(params: PpoParams, rounding: Rounding) -> None:
    """
    Raises:
        BadInput: a clip range per sequence is below twice the ratios that rounding alone gives, so
            that chance would decide which sequences are clipped.
    """
    least = 2 * rounding.sequence_log_ratio
    if params.loss_level is LossLevel.sequence and params.cliprange_sequence < least:
        raise BadInput(
            f"ppo.cliprange_sequence {params.cliprange_sequence} with ppo.loss_level sequence: "
            f"rounding alone gives ratios up to {least:.2g} off 1, so it would clip at random. "
            "Next: set model.dtype to float32, ppo.loss_level to token, or ppo.cliprange_sequence "
            f"to {least:.2g} or more"
        )
