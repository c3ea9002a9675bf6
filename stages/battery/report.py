"""Files for readers.

The SFT model's best and worst samples, the probes that beat their original, and tables to plot.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from stages.battery.best_of_n import ScoredSamples
from stages.battery.probes import ProbeResult, failure_rate
from stages.lib.core.files import write_csv
from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.primary import PrimaryJudge

SHOWN_PROMPTS = 24
SHOWN_TEXTS = 3  # per probe and ending


class ScoredText(TypedDict):
    """A row of samples.jsonl, which people and docs/bench/battery_report.py read.

    kind: `best` or `worst` of a prompt's samples, or `reversed`: a probe (`name`) scores above its
    original. score: calibrated. judge_score: by the primary judge, unless it only compares.
    """

    kind: str
    name: str
    prompt: Prompt
    text: str
    score: float
    judge_score: NotRequired[float]
    original: str
    original_score: float | None


def best_and_worst(samples: ScoredSamples) -> list[ScoredText]:
    """For each prompt the samples with the highest and the lowest score."""
    rows: list[ScoredText] = []
    prompts = list(zip(samples.prompts, samples.by_prompt(), strict=True))[:SHOWN_PROMPTS]
    for prompt, indices in prompts:
        for kind, choose in (("best", max), ("worst", min)):
            index = choose(indices, key=lambda i: samples.scores[i])
            rows.append(_row(kind, "sft", prompt, samples.texts[index], samples.scores[index]))
    return rows


def worst_failures(results: Mapping[str, Sequence[ProbeResult]]) -> list[ScoredText]:
    """For each probe and ending the texts that beat the original by most."""
    rows: list[ScoredText] = []
    for name, probe_results in results.items():
        failures = sorted(
            (result for result in probe_results if result.beats_original == 1),
            key=lambda result: result.original_score - result.score,
        )
        rows += [
            _row("reversed", name, r.prompt, r.text, r.score, r.original, r.original_score)
            for r in failures[:SHOWN_TEXTS]
        ]
    return rows


def with_judge_scores(rows: Sequence[ScoredText], judge: PrimaryJudge) -> list[ScoredText]:
    """The rows with the judge's score of each text, unless the judge only compares."""
    scores = judge.scores([row["prompt"] for row in rows], [row["text"] for row in rows])
    if scores is None:
        return list(rows)
    return [{**row, "judge_score": score} for row, score in zip(rows, scores, strict=True)]


def _row(
    kind: str,
    name: str,
    prompt: Prompt,
    text: str,
    score: float,
    original: str = "",
    original_score: float | None = None,
) -> ScoredText:
    return {
        "kind": kind,
        "name": name,
        "prompt": prompt,
        "text": text,
        "score": round(score, 4),
        "original": original,
        "original_score": None if original_score is None else round(original_score, 4),
    }


def write_plots(
    folder: Path,
    metrics: Metrics,
    scores: Mapping[str, Sequence[float]],
    results: Mapping[str, Sequence[ProbeResult]],
) -> None:
    """Tables for `dvc plots`: rates of probes and endings, accuracy per slice, all scores."""
    rates = {name: failure_rate(probe_results, "texts") for name, probe_results in results.items()}
    write_csv(
        folder / "probes.csv",
        ("probe", "rate", "low", "high"),
        ((name, rate["rate"], rate["low"], rate["high"]) for name, rate in rates.items()),
    )
    accuracies = {
        f"{group} {name}": accuracy
        for group, slices in metrics["accuracy"].items()
        for name, accuracy in slices.items()
    }
    write_csv(
        folder / "accuracy.csv",
        ("slice", "accuracy", "low", "high", "pairs"),
        ((name, *accuracy.values()) for name, accuracy in accuracies.items()),
    )
    write_csv(
        folder / "scores.csv",
        ("scored", "score"),
        ((name, round(score, 4)) for name, values in scores.items() for score in values),
    )


def format_metric(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
