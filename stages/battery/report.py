"""What a reader looks at: the SFT model's best and worst answers, the texts that fooled the reward
model, tables to plot.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.battery.best_of_n import ScoredSamples
from stages.battery.metrics import rate
from stages.battery.probes import ProbeResult
from stages.lib.core.types import Prompt, Row
from stages.lib.metrics.sentiment import sentiment

PROMPTS, TRIALS = 24, 3  # shown: prompts, and texts of each probe and ending


def best_and_worst(answers: ScoredSamples) -> list[Row]:
    """Of each prompt the answers that score highest and lowest."""
    rows = []
    for prompt, places in list(zip(answers.prompts, answers.by_prompt(), strict=True))[:PROMPTS]:
        for kind, choose in (("best", max), ("worst", min)):
            place = choose(places, key=lambda i: answers.scores[i])
            rows.append(_row(kind, "sft", prompt, answers.texts[place], answers.scores[place]))
    return rows


def worst_failures(trials: Mapping[str, Sequence[ProbeResult]]) -> list[Row]:
    """Of each probe and ending the texts that beat the original by most."""
    rows = []
    for name, tried in trials.items():
        winners = sorted(
            (trial for trial in tried if trial.fooled == 1),
            key=lambda trial: trial.original_score - trial.score,
        )
        rows += [
            _row("fooled", name, t.prompt, t.text, t.score, t.original, t.original_score)
            for t in winners[:TRIALS]
        ]
    return rows


def _row(
    kind: str,
    name: str,
    prompt: Prompt,
    text: str,
    score: float,
    original: str = "",
    original_score: float | None = None,
) -> Row:
    return {
        "kind": kind,
        "name": name,
        "prompt": prompt,
        "text": text,
        "score": round(score, 4),
        "sentiment": sentiment([prompt], [text])[0],
        "original": original,
        "original_score": None if original_score is None else round(original_score, 4),
    }


def write_plots(
    folder: Path,
    metrics: Row,
    scores: Mapping[str, Sequence[float]],
    trials: Mapping[str, Sequence[ProbeResult]],
) -> None:
    """What `dvc plots` draws: rates of probes and endings, accuracy by slice, scores by what was
    scored.
    """
    rates = {
        name: rate([trial.fooled for trial in tried], "rate", "texts")
        for name, tried in trials.items()
    }
    _table(
        folder / "probes.csv",
        ("probe", "rate", "low", "high"),
        ((name, *list(each.values())[:3]) for name, each in rates.items()),
    )
    found = {
        f"{group} {name}": each
        for group, named in metrics["accuracy"].items()
        for name, each in named.items()
    }
    _table(
        folder / "accuracy.csv",
        ("slice", "accuracy", "low", "high", "pairs"),
        ((name, *each.values()) for name, each in found.items()),
    )
    _table(
        folder / "scores.csv",
        ("scored", "score"),
        ((name, round(score, 4)) for name, each in scores.items() for score in each),
    )


def _table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(header)
        table.writerows(rows)
