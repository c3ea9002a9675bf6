"""A run of an online algorithm: update after update, with health monitor, validation, checkpoints
and resume state.

Everything that a run writes before its end is in the work folder, because DVC deletes the outputs
of a killed stage.
"""

from collections.abc import Sequence

from stages.lib.core.errors import BadInput
from stages.lib.core.files import work_dir
from stages.lib.core.params import Params
from stages.lib.core.params.policy import LossLevel, PpoParams
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import Metrics, StateDict
from stages.lib.data.rollouts import RolloutLog
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import world
from stages.lib.lm.saving import save_trained, weights_hash
from stages.ppo.common.episodes import Episode
from stages.ppo.common.health import Monitor, Rounding
from stages.ppo.common.outputs import describe_texts, rollout_rows
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.reference import check_reference_weights
from stages.ppo.common.resume import Resume
from stages.ppo.trainer.update import PpoTrainer, Rollout

SHOWN = ("score_mean", "judge_score_mean", "kl", "response_length", "distinct_2", "entropy")


class TrainingRun:
    """A run from its first update, or from the saved state of a killed run.

    Attributes:
        selector: remembers the best policy so far.
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
        self.trainer, self.params = trainer, params.ppo
        self.resume = Resume(work_dir(round_, "ppo"), identity)
        self.work = self.resume.folder
        self.judge = load_primary_judge(params, round_)
        self.selector = PolicySelector(
            trainer.roles, held_out, self.judge, self.params, params.seed
        )
        self.monitor = Monitor(self.params, trainer.algorithm.kl_key)
        with trainer.roles.reference() as reference:
            self.reference = weights_hash(reference)
        saved = self.resume.load(mapped=trainer.roles.sharded)
        world.wait()  # until every process has read the state
        steps = saved["steps"] if saved else ()
        self.recorder = MetricLogger(
            "ppo", round_, trainer.planned_updates, steps, writes=world.is_main()
        )
        if world.is_main() and not saved:
            # rollouts of a run that was killed before it saved a state
            self.resume.clear()
        position = saved["rollouts"] if saved else (1, 0)
        self.rollouts = RolloutLog(self.work / "rollouts", position, writes=world.is_main())
        if saved:
            self.load_state(saved)

    def train(self) -> None:
        """Run all updates, until the last one or until a danger stops the run."""
        trainer = self.trainer
        if not trainer.updates:
            if not trainer.roles.starts_as_reference:
                self.selector.validate_reference()
            self.selector.validate(0)
            trainer.sft_length = self.selector.first.length
            self.monitor.rounding = self.selector.rounding
            if trainer.algorithm.has_critic:  # RLOO and GRPO have no ratio per 1 / length
                check_clip_range(self.params, self.selector.rounding)
        while trainer.updates < trainer.planned_updates and not self.monitor.stopped:
            # 1. update the policy, keep the rollout
            rollout, metrics = trainer.step()
            rows = self.episode_rows(rollout, metrics["kl_coef"])
            self.rollouts.append(rows)
            metrics |= describe_texts(rows)
            for failure in rollout.failures:
                self.recorder.log_progress(trainer.updates, failure)
            del rollout  # its states would stay in memory while the next ones are computed

            # 2. health
            step = {"step": trainer.updates, **metrics}
            findings = self.monitor.check([*self.recorder.steps, step])

            # 3. validation, but not after a danger
            if self.validation_is_due() and not self.monitor.stopped:
                validation = self.selector.validate(trainer.updates).metrics
                metrics |= validation
                findings += self.monitor.check([*self.recorder.steps, step | validation])

            # 4. report
            shown = [name for name in metrics if name in SHOWN or name.startswith("validation")]
            self.recorder.log(trainer.updates, metrics, shown)
            for finding in findings:
                self.recorder.log_progress(trainer.updates, str(finding))

            # 5. checkpoint; the resume state comes last, so that it covers all of the above
            self.save()
        self.check_reference(self.reference, "after the last update")

    def save(self) -> None:
        """Save a checkpoint and the state, each if it is due: the first process writes, and all
        give it their parts of sharded models.
        """
        trainer = self.trainer
        if trainer.updates % self.params.save_updates == 0:
            folder = self.work / "checkpoints" / f"step_{trainer.updates:05d}"
            save_trained(trainer.roles.policy, trainer.roles.tokenizer, folder)
        ended = trainer.updates == trainer.planned_updates or self.monitor.stopped
        if trainer.updates % self.params.resume_updates == 0 or ended:
            state = self.state() | {"rollouts": self.rollouts.position}
            if world.is_main():
                self.resume.save(state)

    def episode_rows(self, rollout: Rollout, kl_coef: float) -> list[RolloutRow]:
        """One row per episode; kl_cost: score units that its KL cost it."""
        prompts = [row["prompt"] for row in rollout.rows]
        kls = rollout.sequence_kl
        rows = rollout_rows(
            self.trainer.updates,
            rollout.rows,
            rollout.texts,
            scores=rollout.calibrated,
            parts=rollout.parts,
            rewards=rollout.scores,
            judge_scores=self.judge.scores(prompts, rollout.texts),
            kls=kls,
            lengths=[len(response) for response in rollout.responses],
            ended=rollout.ended,
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

    def validation_is_due(self) -> bool:
        """Every `validation_updates`, and after the last update."""
        updates = self.trainer.updates
        return (
            updates % self.params.validation_updates == 0 or updates == self.trainer.planned_updates
        )

    def state(self) -> StateDict:
        """Everything that the rest of the run and its outputs depend on, for `load_state`."""
        return {
            "reference": self.reference,
            "trainer": self.trainer.state(),
            "selector": self.selector.state(),
            "steps": self.recorder.steps,
        }

    def load_state(self, state: StateDict) -> None:
        """Continue from a state, whose metrics and rollouts the logs already contain.

        Raises:
            RondoError: the reference has other weights than the one of the state.
        """
        self.check_reference(state["reference"], "after the resume")
        self.trainer.load_state(state["trainer"])
        self.selector.load_state(state["selector"])
        self.monitor.rounding = self.selector.rounding
        self.monitor.check_history(self.recorder.steps)
        self.recorder.log_progress(self.trainer.updates, "resumes from here")


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
