"""Means of each model's samples, and paired comparisons of models by the jury."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.lib.core.params import Params
from stages.lib.core.rows import EvaluationSample, PromptRow
from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.metrics.stats import paired_bootstrap, pearson, prompts_needed
from stages.lib.metrics.text import distinct_n

Interval = tuple[float, float, float]  # mean, and low and high end of its 95% interval


def describe(passes: list[OneSamplePerPrompt]) -> dict[str, float]:
    """Means over all samples.

    distinct_2 is counted across the prompts of one pass, then averaged: counted across all passes
    it would fall with their number.
    """
    samples = [sample for one_pass in passes for sample in one_pass]
    values = {
        "sentiment": [s.lexicon.sentiment for s in samples],
        "sentiment_plain": [s.lexicon.sentiment_plain for s in samples],
        "score": [s.score for s in samples],
        "kl": [s.kl for s in samples],
        "length": [float(s.length) for s in samples],
        "eos_rate": [float(s.ended) for s in samples],
        "distinct_2": [distinct_n((s.text for s in one_pass), 2) for one_pass in passes],
        "repetition_3": [s.lexicon.repetition for s in samples],
    }
    means = {name: sum(column) / len(column) for name, column in values.items()}
    means["nll"] = -sum(s.sft_logprob for s in samples) / sum(s.length for s in samples)
    # falls towards 0 if the policy has learnt to please the reward model alone
    correlation = pearson(values["score"], values["sentiment"])
    return means if correlation is None else means | {"score_sentiment_correlation": correlation}


def paired_win_rates(
    a: list[OneSamplePerPrompt],
    b: list[OneSamplePerPrompt],
    prompts: Sequence[Prompt],
    jury: Jury,
    params: Params,
) -> dict[str, Interval]:
    """Compare model A with model B, sample by sample, on the passes that both have.

    Returns:
        Means with 95% intervals over prompts. `win_rate`: A's share of wins by the whole jury (a
        tie is half a win); `win_rate_<judge>`: by each judge; `sentiment_gain`: A's sentiment less
        B's.
    """
    pairs_by_pass = [list(zip(x, y, strict=True)) for x, y in zip(a, b, strict=False)]
    votes = jury.compare(
        [
            Comparison(prompt, x.text, y.text)
            for pairs in pairs_by_pass
            for prompt, (x, y) in zip(prompts, pairs, strict=True)
        ]
    )
    columns = {
        "win_rate" if name == JURY else f"win_rate_{name}": values for name, values in votes.items()
    }
    columns["sentiment_gain"] = [
        x.lexicon.sentiment - y.lexicon.sentiment for pairs in pairs_by_pass for x, y in pairs
    ]
    # the bootstrap resamples prompts: one row per prompt, one column per pass
    by_prompt = {
        name: np.reshape(column, (len(pairs_by_pass), -1)).T.tolist()
        for name, column in columns.items()
    }
    resamples, seed = params.evaluate.bootstrap_resamples, params.seed
    return {
        name: paired_bootstrap(clusters, resamples, seed) for name, clusters in by_prompt.items()
    }


class ModelResults:
    """Samples and means of each model on the frozen prompts, by the model's name.

    losses: metrics.json of SFT, with the losses of base and SFT on human texts.
    """

    def __init__(self, evaluator: Evaluator, losses: Metrics, label: str) -> None:
        self.evaluator, self.losses, self.label = evaluator, losses, label
        self.samples: dict[str, list[OneSamplePerPrompt]] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    def add_model(self, name: str, model: Any, samples: int) -> None:
        """Sample `samples` responses per prompt, and record and print their means."""
        self.samples[name] = self.evaluator.sample_all(model, samples)
        metrics = self.metrics[name] = describe(self.samples[name])
        if name in ("base", "sft"):
            loss = self.losses["loss_before" if name == "base" else "loss_after"]
            metrics["ppl_human"] = math.exp(loss)
        if name == "ppo":
            metrics["ppl_human"] = self.evaluator.perplexity(model)
        print_metrics(self.label, name, metrics)

    def win_rates(self, name: str, other: str, jury: Jury) -> dict[str, Interval]:
        """`paired_win_rates` of the first model against the second."""
        a, b = self.samples[name], self.samples[other]
        return paired_win_rates(a, b, self.evaluator.prompts, jury, self.evaluator.params)


def print_metrics(label: str, subject: str, metrics: Mapping[str, float | None]) -> None:
    numbers = [f"{name} {value:.3f}" for name, value in metrics.items() if isinstance(value, float)]
    print(f"[{label}] {subject}: {'  '.join(numbers)}", flush=True)


def with_interval(name: str, interval: Interval) -> dict[str, float]:
    """The three numbers as `name`, `name_low` and `name_high`."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def with_intervals(intervals: Mapping[str, Interval]) -> dict[str, float]:
    return {
        key: value
        for name, interval in intervals.items()
        for key, value in with_interval(name, interval).items()
    }


def win_rate_with_prompts_needed(
    name: str, interval: Interval, prompts: int, label: str
) -> dict[str, float | None]:
    """A win rate with its interval, and how many prompts would decide it; printed if undecided."""
    needed = prompts_needed(prompts, *interval)
    if needed:
        message = f"cannot decide with {prompts} prompts: about {needed} would"
        print(f"[{label}] {name} {interval[0]:.3f} {message}", flush=True)
    return {**with_interval(name, interval), f"{name}_prompts_needed": needed}


def side_by_side(
    rows: Sequence[PromptRow], samples: Mapping[str, list[OneSamplePerPrompt]]
) -> list[EvaluationSample]:
    """One row per prompt and sample number, with each model's text, sentiment and reward score.

    A model with fewer samples per prompt than SFT is in the first rows of a prompt only.
    """
    return [
        evaluation_sample(
            row, number, {n: p[number][index] for n, p in samples.items() if number < len(p)}
        )
        for index, row in enumerate(rows)
        for number in range(len(samples["sft"]))
    ]


def evaluation_sample(
    row: PromptRow, number: int, samples: Mapping[str, Sample]
) -> EvaluationSample:
    """The columns of the models by their names."""
    columns = (
        {"id": row["id"], "sample": number, "prompt": row["prompt"]}
        | {name: sample.text for name, sample in samples.items()}
        | {f"{name}_sentiment": round(s.lexicon.sentiment, 4) for name, s in samples.items()}
        | {f"{name}_score": round(sample.score, 4) for name, sample in samples.items()}
    )
    return cast(EvaluationSample, columns)
