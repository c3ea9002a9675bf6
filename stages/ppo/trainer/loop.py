"""A run of PPO from its first update, or from where a killed one got to, to its last; everything it
writes goes to the work folder.
"""

from collections.abc import Sequence

from stages.lib.core.files import work_dir
from stages.lib.core.params import Params
from stages.lib.core.params.policy import OnDanger
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import Row
from stages.lib.data.rollouts import RolloutLog
from stages.lib.lm.saving import save_trained
from stages.lib.metrics.sentiment import sentiment
from stages.ppo.common.episodes import Episode
from stages.ppo.common.health import Monitor, first_danger
from stages.ppo.common.outputs import describe_texts, rollout_rows
from stages.ppo.common.policy_selection import NO_VALIDATION, PolicySelector, Validation
from stages.ppo.trainer.resume import Resume
from stages.ppo.trainer.update import PpoTrainer, Rollout

SHOWN = ["score_mean", "judge_mean", "kl", "response_length", "distinct_2", "entropy"]


class TrainingRun:
    """`before`: what the judge says of the policy that has learnt nothing yet. `stopped`: the sign
    that ended the run early, or nothing.
    """

    def __init__(
        self,
        trainer: PpoTrainer,
        held_out: Sequence[Episode],
        params: Params,
        round_: str,
        identity: Row,
    ) -> None:
        self.trainer, self.params = trainer, params.ppo
        self.resume = Resume(work_dir(round_, "ppo"), identity)
        self.work = self.resume.folder
        self.best = PolicySelector(trainer.roles, held_out, sentiment, self.params, params.seed)
        self.monitor = Monitor(self.params)
        self.stopped, self.before = "", NO_VALIDATION
        saved = self.resume.load()
        if not saved:
            self.resume.clear()
        self.recorder = MetricLogger(
            "ppo", round_, trainer.planned_updates, saved["steps"] if saved else ()
        )
        self.rollouts = RolloutLog(self.work / "rollouts", saved["rollouts"] if saved else (1, 0))
        if saved:
            trainer.load_state(saved["trainer"])
            self.best.load_state(saved["best"])
            self.stopped, self.before = saved["stopped"], Validation(*saved["before"])
            for number in range(len(self.recorder.steps)):
                self.monitor.read(self.recorder.steps[: number + 1])
            self.recorder.log_progress(trainer.updates, "goes on from here")

    def train(self) -> None:
        """Update after update, until done or in danger; the state to resume from is saved last, so
        that it covers the rest.
        """
        trainer, p = self.trainer, self.params
        if not trainer.updates:
            self.before = self.best.validate(0)
        while trainer.updates < trainer.planned_updates and not self.stopped:
            rollout, metrics = trainer.step()
            rows = episode_rows(trainer.updates, rollout, metrics["kl_coef"])
            self.rollouts.append(rows)
            metrics |= describe_texts(rows)
            findings = self.monitor.read(
                [*self.recorder.steps, {"step": trainer.updates, **metrics}]
            )
            if p.on_danger is OnDanger.stop:
                self.stopped = first_danger(findings)
            if (
                trainer.updates % p.validation_updates == 0
                or trainer.updates == trainer.planned_updates
            ) and not self.stopped:
                validation = self.best.validate(trainer.updates)
                metrics |= {"validation_judge": validation.judge, "validation_kl": validation.kl}
            self.recorder.log(
                trainer.updates,
                metrics,
                [*SHOWN, *(name for name in metrics if name.startswith("validation"))],
            )
            for finding in findings:
                self.recorder.log_progress(trainer.updates, str(finding))
            if trainer.updates % p.save_updates == 0:
                save_trained(
                    trainer.roles.policy,
                    trainer.roles.tokenizer,
                    self.work / "checkpoints" / f"step_{trainer.updates:05d}",
                )
            if trainer.updates % p.resume_updates == 0:
                self.save()

    def save(self) -> None:
        self.resume.save(
            {
                "trainer": self.trainer.state(),
                "best": self.best.state(),
                "before": list(self.before),
                "steps": self.recorder.steps,
                "rollouts": self.rollouts.place,
                "stopped": self.stopped,
            }
        )


def episode_rows(update: int, rollout: Rollout, kl_coef: float) -> list[Row]:
    """One row an episode; kl_cost: what its KL cost it."""
    kls = rollout.sequence_kl
    rows = rollout_rows(
        update,
        rollout.rows,
        rollout.texts,
        scores=rollout.calibrated,
        parts=rollout.parts,
        rewards=rollout.scores,
        kls=kls,
        lengths=[len(response) for response in rollout.responses],
        ended=rollout.ended,
    )
    return [
        row | {"kl_cost": round(kl_coef * kl, 4)}
        for row, kl in zip(rows, kls.tolist(), strict=True)
    ]
