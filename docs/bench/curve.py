"""Time to quality: the judge's score of a policy on held-out prompts against seconds of training.

`python docs/bench/curve.py --set seed=1 --set ppo.lora.top_layers=null` after `make run` trains PPO
alone, on the models of round r0, and prints JSON. trl_ppo.py measures TRL's policies with the
same `Curve`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.rows import TrainingPrompt, read_rows
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm.loading import setup_torch
from stages.ppo.common import episodes as ppo_episodes
from stages.ppo.common.episodes import Episode
from stages.ppo.common.policy_selection import PolicySelector, Validation
from stages.ppo.trainer.loop import warm_up_critic
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer

ROUND = "r0"
SFT, REWARD = (stage_dir(ROUND, stage) / "model" for stage in ("sft", "reward"))


def episodes(params: Params, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
    """The prompts that PPO trains on, and the held-out prompts."""
    path = Path(f"rounds/{ROUND}/prepare/data/prompts_train.jsonl")
    rows = read_rows(TrainingPrompt, path, "make run")
    return ppo_episodes.make_episodes(rows, tokenizer, params)


def make_trainer(params: Params) -> tuple[PpoTrainer, PolicySelector]:
    """PPO on the models of the round, and what validates its policies on the held-out prompts."""
    setup_torch(params)
    roles = load_roles(params, SFT, REWARD)
    train, held_out = episodes(params, roles.tokenizer)
    judge = load_primary_judge(params, ROUND)
    trainer = PpoTrainer(roles, train, params.ppo, params.seed)
    return trainer, PolicySelector(roles, held_out, judge, params.ppo, params.seed)


class Curve:
    """Measurements of a policy against seconds of training; the time to measure is excluded."""

    def __init__(self, measure: Callable[[int], Validation]) -> None:
        self.measure, self.seconds, self.started = measure, 0.0, time.perf_counter()
        self.points: list[dict[str, float]] = []

    def point(self, update: int) -> None:
        """Measure the policy after this update; update 0 is the policy before training."""
        self.seconds += time.perf_counter() - self.started if update else 0.0
        metrics = {"update": update, **self.measure(update).metrics}
        self.points.append({"seconds": round(self.seconds, 1), **metrics})
        print(self.points[-1], file=sys.stderr, flush=True)
        self.started = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=4, help="updates between measurements")
    parser.add_argument("--updates", type=int, help="stop after these, with the rates of the plan")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    # Imported here, because trl_ppo.py imports this module in TRL's environment, which lacks
    # libraries that flows needs.
    from flows.core.config import resolve

    params = resolve("keep", None, options.set)
    trainer, selector = make_trainer(params)
    curve = Curve(selector.validate)
    curve.point(0)
    warm_up_critic(trainer, selector)
    while trainer.updates < (options.updates or trainer.planned_updates):
        _, metrics = trainer.step()
        if trainer.updates % options.every == 0:
            curve.point(trainer.updates)
            curve.points[-1] |= {
                name: metrics[name] for name in ("score_mean", "entropy", "response_length")
            }
    print(json.dumps(curve.points))


if __name__ == "__main__":
    main()
