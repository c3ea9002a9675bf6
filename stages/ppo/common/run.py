"""A run of the policy stage, whoever trains: its start, and what follows each update."""

from pathlib import Path

from stages.lib.core.files import work_dir
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import Metrics, StateDict
from stages.lib.data.rollouts import RolloutLog
from stages.lib.lm import world
from stages.lib.lm.saving import save_trained
from stages.ppo.common.health import Monitor
from stages.ppo.common.policy_selection import PolicySelector
from stages.ppo.common.resume import Resume

# in the progress line, beside those of validations; an algorithm has some of them
SHOWN = (
    *("loss", "accuracy", "score_mean", "judge_score_mean"),
    *("kl", "response_length", "distinct_2", "entropy"),
)


def open_run(
    round_: str, identity: Metrics, planned_updates: int = 0, mapped: bool = False
) -> tuple[Resume, StateDict | None, MetricLogger]:
    """The resume state of a run, the state from which it continues if it was killed, and its log.

    mapped: the tensors of the state stay in its file until they are read.
    """
    resume = Resume(work_dir(round_, "ppo"), identity)
    saved = resume.load(mapped)
    world.wait()  # until every process has read the state
    if not saved and world.is_main():
        resume.clear()  # files of a run that was killed before it saved a state
    steps = saved["steps"] if saved else ()
    return resume, saved, MetricLogger("ppo", round_, planned_updates, steps, world.is_main())


class Run:
    """Health, validation, metrics and checkpoints of a policy in training."""

    ppo: PpoParams
    recorder: MetricLogger
    monitor: Monitor
    selector: PolicySelector  # remembers the best policy so far
    # the files of the run until its end, since DVC deletes outputs of a killed stage
    work: Path
    rollouts: RolloutLog

    def open_rollouts(self, saved: StateDict | None) -> None:
        """Open the log of rollouts where the saved state ends."""
        position = saved["rollouts"] if saved else (1, 0)
        self.rollouts = RolloutLog(self.work / "rollouts", position, writes=world.is_main())

    def validate_first(self) -> None:
        """Validate the policy before training, and measure what rounding alone shows of it."""
        self.selector.validate(0)
        self.monitor.rounding = self.selector.rounding

    def end_update(self, update: int, metrics: dict[str, float], last: bool) -> None:
        """Check, validate, log and save the policy after an update.

        Args:
            update: its number, from 1.
            metrics: of the update.
            last: whether it is the last one that was planned.
        """
        policy, steps = self.selector.roles.policy, self.recorder.steps
        findings = self.monitor.check([*steps, {"step": update, **metrics}])
        due = last or update % self.ppo.validation_updates == 0
        if due and not self.monitor.stopped:
            training = policy.training  # a mode on which TRL's trainers rely
            policy.eval()
            metrics |= self.selector.validate(update).metrics
            policy.train(training)
            findings += self.monitor.check([*steps, {"step": update, **metrics}])
        shown = [name for name in metrics if name in SHOWN or name.startswith("validation")]
        self.recorder.log(update, metrics, shown)
        for finding in findings:
            self.recorder.log_progress(update, str(finding))
        if update % self.ppo.save_updates == 0:
            folder = self.work / "checkpoints" / f"step_{update:05d}"
            save_trained(policy, self.selector.roles.tokenizer, folder)

    @property
    def outcome(self) -> Metrics:
        """The metrics of every run: how it ended, and the kept policy."""
        return {
            "stopped": self.monitor.stopped or "completed",
            **self.selector.metrics,
            "health": self.monitor.verdict,
            # up to the kept policy's own rollout
            "dangers": self.monitor.dangers(self.selector.best.update + 1),
        }

    def resume_log(self, update: int, selector: StateDict) -> None:
        """Continue after an update: the selector has its state, the monitor what was logged."""
        self.selector.load_state(selector)
        self.monitor.rounding = self.selector.rounding
        self.monitor.check_history(self.recorder.steps)
        self.recorder.log_progress(update, "resumes from here")
