"""A run of PPO from its first update, or from where a killed one got to, to its last; everything it writes goes to the work folder."""

from dataclasses import asdict
from pathlib import Path

from stages.judges import judge
from stages.models import save_adapter
from stages.params import OnDanger, Params
from stages.ppo.health import DANGER, Monitor
from stages.ppo.resume import Resume
from stages.ppo.roles import Roles
from stages.ppo.rollouts import RolloutLog
from stages.ppo.trainer import PpoTrainer, Rollout
from stages.records import Recorder, Row, work_dir
from stages.statistics import pearson
from stages.text import suffixes

SHOWN = ["score_mean", "judge_mean", "kl", "response_length", "distinct_2", "entropy"]
ENDING_TOKENS = 2


class Run:
    """`stopped`: the sign that ended it early, or nothing. `work`: rollouts/, checkpoints/ and the resume state."""

    def __init__(self, trainer: PpoTrainer, params: Params, round_: str, identity: Row) -> None:
        self.trainer, self.params, self.work = trainer, params.ppo, work_dir(round_, "ppo") / "run"
        self.resume = Resume(self.work, identity)
        saved = self.resume.load()
        if saved:
            trainer.load_state(saved["trainer"])
        else:
            self.resume.clear()
        self.recorder = Recorder("ppo", round_, trainer.planned_updates, saved["steps"] if saved else ())
        self.rollouts = RolloutLog(self.work / "rollouts", saved["rollouts"] if saved else (1, 0))
        self.stopped: str = saved["stopped"] if saved else ""
        self.monitor = Monitor(self.params)
        for number in range(len(self.recorder.steps)):
            self.monitor.read(self.recorder.steps[: number + 1])
        if saved:
            self.recorder.say(trainer.updates, "goes on from here")

    def train(self) -> None:
        """Update after update, until done or in danger; the state to resume from is saved last, so that it covers the rest."""
        trainer = self.trainer
        while trainer.updates < trainer.planned_updates and not self.stopped:
            rollout, metrics = trainer.step()
            rows = episodes(trainer.updates, rollout, trainer.roles, metrics["kl_coef"])
            self.rollouts.append(rows)
            self.recorder.log(trainer.updates, metrics | second_opinion(rows), SHOWN)
            for finding in self.monitor.read(self.recorder.steps):
                self.recorder.say(trainer.updates, str(finding))
                if finding.verdict == DANGER and self.params.on_danger is OnDanger.stop:
                    self.stopped = self.stopped or finding.sign
            if trainer.updates % self.params.save_updates == 0:
                save_adapter(trainer.roles.policy, self.checkpoints / f"step_{trainer.updates:05d}")
            if trainer.updates % self.params.resume_updates == 0:
                self.resume.save(
                    {"trainer": trainer.state(), "steps": self.recorder.steps, "rollouts": self.rollouts.place, "stopped": self.stopped}
                )

    @property
    def checkpoints(self) -> Path:
        return self.work / "checkpoints"

    def health(self) -> Row:
        return {"verdict": self.monitor.verdict, "findings": [asdict(finding) for finding in self.monitor.findings]}


def episodes(update: int, rollout: Rollout, roles: Roles, kl_coef: float) -> list[Row]:
    """One row an episode. score: calibrated; reward: the score clipped and penalised; kl: nats, and what it cost; judge: sentiment."""
    texts = roles.tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)
    scores = (rollout.raw_scores - roles.score_mean) / roles.score_std
    columns = (each.tolist() for each in (scores, rollout.scores, rollout.sequence_kl, rollout.ended))
    judged = judge([row["prompt"] for row in rollout.rows], texts)
    return [
        {
            "update": update,
            "id": row["id"],
            "prompt": row["prompt"],
            "response": text,
            "score": round(score, 4),
            "reward": round(reward, 4),
            "judge": said.sentiment,
            "kl": round(kl, 4),
            "kl_cost": round(kl_coef * kl, 4),
            "finish_reason": "stop" if ended else "length",
            "length": len(tokens),
        }
        for row, text, score, reward, kl, ended, said, tokens in zip(rollout.rows, texts, *columns, judged, rollout.responses, strict=True)
    ]


def second_opinion(rows: list[Row]) -> dict[str, float]:
    """What a judge that PPO does not see makes of the rollout, and how many texts end alike."""
    ends = [ends[-1] for row in rows if (ends := suffixes(row["response"], ENDING_TOKENS))]
    agreement = pearson([row["score"] for row in rows], [row["judge"] for row in rows])
    return {
        "judge_mean": sum(row["judge"] for row in rows) / len(rows),
        "score_judge_correlation": agreement or 0.0,
        "ending_share": max(map(ends.count, ends), default=0) / len(rows),
    }
