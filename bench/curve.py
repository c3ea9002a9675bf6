"""Time to quality: what the judge says of a policy on held-out prompts, against the seconds it was trained; JSON on stdout.

`python bench/curve.py --set seed=1 --set ppo.lora.top_layers=null` after `make run`: PPO alone, on the models of round r0.
bench/trl_ppo.py measures TRL's policies with the same `Curve`.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from stages.generation import assess, sample
from stages.judges import sentiment
from stages.models import prepare_torch
from stages.params import Params
from stages.ppo.__main__ import split
from stages.ppo.roles import load_roles
from stages.ppo.trainer import Episode, PpoTrainer
from stages.prompts import encode
from stages.records import read_jsonl, stage_dir

ROUND = "r0"
SFT, REWARD = (stage_dir(ROUND, stage) / "model" for stage in ("sft", "reward"))


def episodes(params: Params, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
    """The prompts that PPO trains on, and those held out."""
    rows = read_jsonl(Path(f"rounds/{ROUND}/prepare/data/prompts_train.jsonl"), "make run")
    parts = split(rows, params)
    train, held_out = ([(row, encode(tokenizer, row["prompt"], None, params.prepare.prompt_format)[0]) for row in part] for part in parts)
    return train, held_out


class Curve:
    """The judge's mean and KL (nats a sequence) on held-out prompts, against seconds of training; measuring does not count."""

    def __init__(
        self, params: Params, tokenizer: Any, held_out: list[Episode], reference: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.params, self.tokenizer, self.held_out, self.reference = params, tokenizer, held_out, reference
        self.seconds, self.since = 0.0, time.perf_counter()
        self.points: list[dict[str, float]] = []

    def measure(self, policy: Any, update: int) -> None:
        self.seconds += time.perf_counter() - self.since if update else 0.0
        ids = [tokens for _, tokens in self.held_out]
        generator = torch.Generator().manual_seed(self.params.seed)
        responses = sample(policy, self.tokenizer, ids, self.params.ppo, generator, len(ids))
        eos = self.tokenizer.eos_token_id
        told = assess(policy, self.reference, ids, responses, eos_token_id=eos, temperature=self.params.ppo.temperature, batch_size=32)
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        judged = fmean(sentiment([row["prompt"] for row, _ in self.held_out], texts))
        self.points.append(
            {"update": update, "seconds": round(self.seconds, 1), "judge": round(judged, 4), "kl": round(float(told.kl.mean()), 3)}
        )
        self.since = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    from flows.config import resolve  # needs what TRL's environment does not have

    params = resolve("keep", None, options.set)
    prepare_torch(params)
    roles = load_roles(params, SFT, REWARD)
    train, held_out = episodes(params, roles.tokenizer)
    trainer = PpoTrainer(roles, train, params.ppo, params.seed)
    curve = Curve(params, roles.tokenizer, held_out, roles.policy_trunk.reference)
    curve.measure(roles.policy, 0)
    while trainer.updates < trainer.planned_updates:
        _, metrics = trainer.step()
        if trainer.updates % options.every == 0:
            curve.measure(roles.policy, trainer.updates)
            curve.points[-1] |= {name: metrics[name] for name in ("score_mean", "entropy", "response_length")}
    print(json.dumps(curve.points))


if __name__ == "__main__":
    main()
