"""Means of each model's samples, and paired comparisons of models by the jury."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import numpy as np

from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.lib.core.champion import Champion
from stages.lib.core.params import Params
from stages.lib.core.progress import progress
from stages.lib.core.rows import EvaluationSample, PromptRow
from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.jury import Jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.judging.primary import TIE
from stages.lib.lm.interpolation import interpolate, search_scale
from stages.lib.lm.loading import load_causal_lm, load_policy
from stages.lib.lm.saving import policy_weights
from stages.lib.metrics.stats import (
    Interval,
    mean,
    paired_bootstrap,
    pearson,
    prompts_needed,
    with_interval,
)
from stages.lib.metrics.text import distinct_n, repetition_n


def describe(passes: list[OneSamplePerPrompt]) -> dict[str, float]:
    """Means over all samples; none of `score` without a reward model.

    distinct_2 is counted across the prompts of one pass, then averaged: counted across all passes
    it would fall with their number.
    """
    samples = [sample for one_pass in passes for sample in one_pass]
    scores = known_scores(samples)
    values = {
        **({"score": scores} if scores else {}),
        "kl": [s.kl for s in samples],
        "kl_anchor": [s.kl_anchor for s in samples],
        "length": [float(len(s.tokens)) for s in samples],
        "eos_rate": [float(s.ended) for s in samples],
        "distinct_2": [distinct_n((s.text for s in one_pass), 2) for one_pass in passes],
        "repetition_3": [repetition_n(s.text, 3) for s in samples],
    }
    means = {name: mean(column) for name, column in values.items()}
    means["nll"] = -sum(s.ref_logprob for s in samples) / sum(len(s.tokens) for s in samples)
    return means


def known_scores(samples: Sequence[Sample]) -> list[float]:
    """The reward model's score of each sample; [] if there is no reward model."""
    return [sample.score for sample in samples if sample.score is not None]


def paired_outcomes(
    a: Sequence[OneSamplePerPrompt],
    b: Sequence[OneSamplePerPrompt],
    prompts: Sequence[Prompt],
    jury: Jury,
) -> dict[str, list[list[float]]]:
    """The jury's outcomes of A against B, sample by sample, on the passes that both have.

    Returns:
        By judge, as `Jury.compare`: (passes, prompts) outcomes, 1 if A wins, 0.5 for a tie, else 0.
    """
    passes = list(zip(a, b, strict=False))
    votes = jury.compare(
        [
            Comparison(prompt, x.text, y.text)
            for one, other in passes
            for prompt, x, y in zip(prompts, one, other, strict=True)
        ]
    )
    return {
        judge: np.reshape(values, (len(passes), -1)).tolist() for judge, values in votes.items()
    }


def interval_over_prompts(columns: Sequence[Sequence[float]], params: Params) -> Interval:
    """The mean of values by pass and prompt, with its 95% interval.

    The bootstrap resamples prompts, since the samples of one prompt are alike.
    """
    clusters = np.transpose(columns).tolist()
    return paired_bootstrap(clusters, params.evaluate.bootstrap_resamples, params.seed)


class ModelResults:
    """Samples, judge scores and means of each model on the frozen prompts, by the model's name.

    Args:
        evaluator: makes the samples.
        jury: all judges; the first one is the primary judge.
        losses: metrics.json of SFT, with the losses of base and SFT on human texts.
        label: of the printed lines.

    Attributes:
        judge_scores: by pass and prompt, of the primary judge. If it only compares, the outcome
            against SFT's response; then a model has none before `win_rates` against SFT.
        outcomes: by pass and prompt, of the jury, of the first model of the key against the second.
    """

    def __init__(self, evaluator: Evaluator, jury: Jury, losses: Metrics, label: str) -> None:
        self.evaluator, self.jury, self.losses, self.label = evaluator, jury, losses, label
        self.samples: dict[str, list[OneSamplePerPrompt]] = {}
        self.judge_scores: dict[str, list[list[float]]] = {}
        self.outcomes: dict[tuple[str, str], list[list[float]]] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    def add_model(self, name: str, model: Any, samples: int) -> None:
        """Sample `samples` responses per prompt, and record and print their means."""
        with progress(f"responses of {name}"):
            passes = self.samples[name] = self.evaluator.sample_all(model, samples)
        metrics = self.metrics[name] = describe(passes)
        # over the length of SFT's responses, which is the first model
        metrics["kl_per_token"] = metrics["kl"] / self.metrics.get("sft", metrics)["length"]
        if name in ("base", "sft") and self.evaluator.people:
            loss = self.losses["loss_before" if name == "base" else "loss_after"]
            metrics["ppl_human"] = math.exp(loss)
        if name == "ppo" and self.evaluator.people:
            metrics["ppl_human"] = self.evaluator.perplexity(model)
        prompts, judge = self.evaluator.prompts, self.jury.primary
        scores = [judge.scores(prompts, [s.text for s in one_pass]) for one_pass in passes]
        if None not in scores:
            self.set_judge_scores(name, cast(list[list[float]], scores))
        elif name == "sft":
            self.set_judge_scores(name, [[TIE] * len(prompts) for _ in passes])
        print_metrics(self.label, name, metrics)

    def set_judge_scores(self, name: str, scores: list[list[float]]) -> None:
        """Record judge scores by pass and prompt, and how they go with the reward scores."""
        self.judge_scores[name], metrics = scores, self.metrics[name]
        values = [score for one_pass in scores for score in one_pass]
        rewards = known_scores([s for one_pass in self.samples[name] for s in one_pass])
        metrics |= with_interval(
            "judge_score", interval_over_prompts(scores, self.evaluator.params)
        )
        # falls towards 0 if the policy has learnt to please the reward model alone
        correlation = pearson(rewards[: len(values)], values) if rewards else None
        if correlation is not None:
            metrics["score_judge_correlation"] = correlation

    def win_rates(self, name: str, other: str) -> dict[str, Interval]:
        """Compare model A with model B, sample by sample, on the passes that both have.

        Returns:
            Means with 95% intervals over prompts. `win_rate`: A's share of wins by the whole jury
            (a tie is half a win); `win_rate_<judge>`: by each judge; `judge_gain`: the primary
            judge's score of A less that of B.
        """
        prompts, params = self.evaluator.prompts, self.evaluator.params
        outcomes = paired_outcomes(self.samples[name], self.samples[other], prompts, self.jury)
        self.outcomes[name, other] = outcomes[JURY]
        columns = {
            "win_rate" if judge == JURY else f"win_rate_{judge}": values
            for judge, values in outcomes.items()
        }
        if other == "sft" and name not in self.judge_scores:
            self.set_judge_scores(name, outcomes[self.jury.primary.name])
        if name in self.judge_scores and other in self.judge_scores:
            passes = len(outcomes[JURY])
            a, b = (self.judge_scores[key][:passes] for key in (name, other))
            columns["judge_gain"] = np.subtract(a, b).tolist()
        return {key: interval_over_prompts(column, params) for key, column in columns.items()}

    def rises_and_kls(self) -> tuple[list[float], list[float]]:
        """Per prompt, the policy's mean reward score less SFT's, and its mean KL from SFT."""

        def means(name: str, key: str) -> list[float]:
            passes = [[getattr(sample, key) for sample in one] for one in self.samples[name]]
            return cast(list[float], np.mean(passes, axis=0).tolist())

        policy, sft = means("ppo", "score"), means("sft", "score")
        return np.subtract(policy, sft).tolist(), means("ppo", "kl")


def print_metrics(label: str, subject: str, metrics: Mapping[str, float | None]) -> None:
    numbers = [f"{name} {value:.3f}" for name, value in metrics.items() if isinstance(value, float)]
    print(f"[{label}] {subject}: {'  '.join(numbers)}", flush=True)


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


def side_by_side(rows: Sequence[PromptRow], results: ModelResults) -> list[EvaluationSample]:
    """One row per prompt and sample number, with each model's text, scores, KL and length, and the
    jury's outcomes.

    The models are those of `metrics`. A model with fewer samples per prompt than SFT is in the
    first rows of a prompt only.
    """

    def columns_of(row: PromptRow, index: int, number: int) -> EvaluationSample:
        columns: dict[str, object] = {"id": row["id"], "sample": number, "prompt": row["prompt"]}
        for name in results.metrics:
            passes, judge_scores = results.samples[name], results.judge_scores.get(name, [])
            if number < len(passes):
                sample = passes[number][index]
                columns[name] = sample.text
                if sample.score is not None:
                    columns[f"{name}_score"] = round(sample.score, 4)
                columns[f"{name}_kl"] = round(sample.kl, 4)
                columns[f"{name}_length"] = len(sample.tokens)
            if number < len(judge_scores):
                columns[f"{name}_judge_score"] = round(judge_scores[number][index], 4)
        for (name, other), outcomes in results.outcomes.items():
            if name in results.metrics and number < len(outcomes):
                columns[f"{name}_against_{other}"] = outcomes[number][index]
        return cast(EvaluationSample, columns)

    return [
        columns_of(row, index, number)
        for index, row in enumerate(rows)
        for number in range(len(results.samples["sft"]))
    ]


SCALED = "equal_kl"  # name of the scaled model among the results
WIN_RATE = "win_rate_champion_equal_kl"


def compare_with_champion(results: ModelResults, champion: Champion) -> Metrics:
    """Compare `ppo`, which is in the results, with the champion; adds `champion`, and if their KL
    differs the scaled one of the two.

    Returns:
        The policy's win rates as they are and at equal KL, and which one was scaled by how much.
    """
    evaluator, params = results.evaluator, results.evaluator.params
    samples, prompts = params.evaluate.samples_per_prompt, len(evaluator.prompts)
    model = load_policy(champion.sft, champion.policy, params.model)
    results.add_model("champion", model, samples)
    del model  # freed before the next one is loaded
    win_rate = results.win_rates("ppo", "champion")["win_rate"]
    metrics = win_rate_with_prompts_needed("win_rate_champion", win_rate, prompts, results.label)

    kls = {name: results.metrics[name]["kl_anchor"] for name in ("ppo", "champion")}
    further = max(kls, key=kls.__getitem__)
    files = {
        "ppo": (evaluator.sft_path, evaluator.policy_path),
        "champion": (champion.sft, champion.policy),
    }
    sft, path = files[further]
    model = load_policy(sft, path, params.model)
    trained = policy_weights(model)

    @cache
    def reference_model() -> Any:
        return load_causal_lm(sft, params.model)

    def measure_kl(scale: float) -> float:
        interpolate(model, lambda: nullcontext(reference_model()), trained, scale)
        results.add_model(SCALED, model, samples)
        return results.metrics[SCALED]["kl_anchor"]

    *_, (scale, _) = search_scale(measure_kl, (1.0, kls[further]), min(kls.values()))
    if scale != 1:
        pair = [SCALED if name == further else name for name in ("ppo", "champion")]
        win_rate = results.win_rates(*pair)["win_rate"]
    metrics |= win_rate_with_prompts_needed(WIN_RATE, win_rate, prompts, results.label)
    return metrics | {"equal_kl_scaled": further, "equal_kl_scale": scale}
