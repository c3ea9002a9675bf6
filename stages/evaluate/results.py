"""Evaluation on the frozen prompts: base, SFT, PPO's checkpoints, its policy and the champion, by
judges that are not the reward model.

Every model answers the same prompts with the same random numbers, `samples_per_prompt` times
(checkpoints: `checkpoint_samples_per_prompt`), so that comparisons are paired. The champion is the
last policy that was promoted, on its own SFT model. `reproduced`: a fresh process gave the policy's
first sample of every prompt again, with its score and KL, bit for bit. `overoptimisation`: whether
PPO went too far. `win_rate_prompts_needed`: how many prompts would decide, where these do not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, Row
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.metrics.stats import paired_bootstrap, pearson, prompts_needed
from stages.lib.metrics.text import distinct_n


def describe(passes: list[OneSamplePerPrompt]) -> dict[str, float]:
    """Means over all samples. distinct_2 is counted across the prompts of a pass, then averaged: it
    would fall with more passes.
    """
    samples = [sample for each in passes for sample in each]
    values = {
        "sentiment": [s.judged.sentiment for s in samples],
        "sentiment_plain": [s.judged.sentiment_plain for s in samples],
        "score": [s.score for s in samples],
        "kl": [s.kl for s in samples],
        "length": [float(s.length) for s in samples],
        "eos_rate": [float(s.ended) for s in samples],
        "distinct_2": [distinct_n((s.text for s in each), 2) for each in passes],
        "repetition_3": [s.judged.repetition for s in samples],
    }
    means = {name: sum(column) / len(column) for name, column in values.items()}
    means["nll"] = -sum(s.sft_logprob for s in samples) / sum(s.length for s in samples)
    # falls towards 0 when the policy has learnt to please the reward model alone
    agreement = pearson(values["score"], values["sentiment"])
    return means if agreement is None else means | {"score_sentiment_correlation": agreement}


def paired_win_rates(
    a: list[OneSamplePerPrompt],
    b: list[OneSamplePerPrompt],
    prompts: Sequence[Prompt],
    jury: Jury,
    params: Params,
) -> dict[str, tuple[float, float, float]]:
    """A against B on the passes that both have, each (mean, low, high) over prompts: win_rate of
    the whole jury, win_rate_<judge> of each (ties count half), sentiment_gain.
    """
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(a, b, strict=False)]  # by pass
    told = jury.compare(
        [
            Comparison(p, x.text, y.text)
            for each in pairs
            for p, (x, y) in zip(prompts, each, strict=True)
        ]
    )
    columns = {
        "win_rate" if name == JURY else f"win_rate_{name}": votes for name, votes in told.items()
    }
    columns["sentiment_gain"] = [
        x.judged.sentiment - y.judged.sentiment for each in pairs for x, y in each
    ]
    by_prompt = {
        name: np.reshape(column, (len(pairs), -1)).T.tolist() for name, column in columns.items()
    }
    resamples, seed = params.evaluate.bootstrap_resamples, params.seed
    return {
        name: paired_bootstrap(clusters, resamples, seed) for name, clusters in by_prompt.items()
    }


class ModelResults:
    """What each model has answered to the frozen prompts (`found`), and its means (`metrics`).
    losses: SFT's, of people's texts.
    """

    def __init__(self, evaluator: Evaluator, losses: Row, label: str) -> None:
        self.evaluator, self.losses, self.label = evaluator, losses, label
        self.found: dict[str, list[OneSamplePerPrompt]] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    def add_model(self, name: str, model: Any, samples: int) -> None:
        self.found[name] = self.evaluator.answers(model, samples)
        metrics = self.metrics[name] = describe(self.found[name])
        if name in ("base", "sft"):
            metrics["ppl_human"] = math.exp(
                self.losses["loss_before" if name == "base" else "loss_after"]
            )
        if name == "ppo":
            metrics["ppl_human"] = self.evaluator.perplexity(model)
        say(self.label, name, metrics)


def say(label: str, what: str, numbers: Mapping[str, float | None]) -> None:
    print(
        f"[{label}] {what}: "
        + "  ".join(
            f"{key} {value:.3f}" for key, value in numbers.items() if isinstance(value, float)
        ),
        flush=True,
    )


def with_interval(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def win_rate_with_prompts_needed(
    name: str, interval: tuple[float, float, float], prompts: int, label: str
) -> dict[str, float | None]:
    """A win rate with its interval, and how many prompts would decide it; says so where these are
    too few.
    """
    needed = prompts_needed(prompts, *interval)
    if needed:
        print(
            f"[{label}] {name} {interval[0]:.3f} cannot decide with {prompts} prompts: about {needed} would",
            flush=True,
        )
    return {**with_interval(name, interval), f"{name}_prompts_needed": needed}


def side_by_side(rows: Sequence[Row], found: dict[str, list[OneSamplePerPrompt]]) -> list[Row]:
    """One row a prompt and sample: each model's text, sentiment and reward-model score, as far as
    it has that many samples.
    """
    told: list[Row] = []
    for place, row in enumerate(rows):
        for number in range(len(found["sft"])):
            samples = {
                name: passes[number][place]
                for name, passes in found.items()
                if number < len(passes)
            }
            told.append(
                {"id": row["id"], "sample": number, "prompt": row["prompt"]}
                | {name: sample.text for name, sample in samples.items()}
                | {
                    f"{name}_sentiment": round(sample.judged.sentiment, 4)
                    for name, sample in samples.items()
                }
                | {f"{name}_score": round(sample.score, 4) for name, sample in samples.items()}
            )
    return told
