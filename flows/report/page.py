"""reports/report.html: each round's verdict and next step, then the numbers behind it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flows.core.bookkeeping import bookkeeping
from flows.core.git import revision
from flows.core.locks import Locks, is_here
from flows.core.services import WORKFLOW, LogLine, mlflow_pages
from flows.core.tables import format_number, short_hash
from flows.execution.worktree import run_of_folder
from flows.report import (
    badcases,
    charts,
    cost,
    diagnosis,
    policy_curves,
    round_files,
    samples,
    summary,
)
from flows.report.lineage import origins
from flows.report.round_data import RoundResults, read_badcases, read_round
from flows.report.texts import prompt_text, visible_text
from stages.lib.core.files import REPORTS
from stages.lib.core.html import render_page
from stages.lib.core.params import Params, load_params
from stages.ppo.common.health import WINDOW

REPORT = REPORTS / "report.html"
TERMS = {
    "SFT": "the model that was fine-tuned on demonstrations, before PPO",
    "RM": "the reward model; its score is what PPO raises, in standard deviations of its scores of "
    "demonstrations",
    "policy": "the model that PPO, or another algorithm, made of SFT",
    "champion": "the last policy that passed its gate, or that a person promoted",
    "judge, jury": "what compares responses of two models (evaluate.judges); the first judge is "
    "the primary one",
    "win rate": "share of prompts on which the jury prefers the policy's response; a tie is half",
    "KL": "how far the policy is from SFT, in nats: 0 for the same model",
    "equal KL": "a comparison of two policies that are scaled to the same KL",
    "scaled": "the policy's change of SFT's weights, times this number, has the KL that is wanted",
    "distinct-2": "share of different word pairs over all responses; low if all texts are alike",
    "badcase": "a response of the policy that failed, e.g. `blind_spot`: the reward model prefers "
    "it, the judge does not",
}
PossibleRate = tuple[float | None, float | None, float | None]
REWARD_SCALE = 4  # the reward model's score varies about four times as much as the judge's


def write_pages(rounds: Sequence[str], locks: Locks, log: LogLine) -> None:
    """Write the pages to which the report links: of each round's samples, and of all badcases. If
    one fails, this is logged, and the report and the other pages are written.
    """

    def logged(path: Path) -> AbstractContextManager[None]:
        return bookkeeping(f"writing {path} (`rondo report` tries again)", log)

    for name in rounds:
        with logged(samples.path_of(name)):
            samples.write(name, locks)
    with logged(badcases.PAGE):
        badcases.write(rounds, locks)


def write(rounds: Sequence[str], locks: Locks) -> Path:
    """Write the report of these rounds, with the results of the stages in `locks`, and return its
    path.
    """
    summary.replace_text(REPORT, lambda: render(rounds, locks))
    return REPORT


def render(rounds: Sequence[str], locks: Locks) -> str:
    results, names = [read_round(name, locks) for name in rounds], list(rounds)
    decided = diagnosis.deciding_round(names, locks) if names else ""
    return render_page(
        "flows.report",
        "report.html.jinja",
        {
            "visible": visible_text,
            "prompt": prompt_text,
            "number": format_number,
            "short": short_hash,
            "sentence": sentence,
        },
        stages=round_files.STAGES,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        revision=revision(),
        made_with=made_with(rounds, locks),
        rounds=results,
        answer=diagnosis.answer(decided, locks) if decided else None,
        others=[diagnosis.answer(name, locks) for name in names if name != decided],
        texts=texts(decided) if decided else {},
        run=run_of_folder(),
        complete=all(map(is_here, locks.values())),
        table=summary.rows(names, locks),
        notes=[*summary.not_comparable(names, locks), *summary.judge_lines(names, locks)],
        charts={result.name: pictures(result) for result in results},
        window=WINDOW,
        terms=TERMS,
        badcases=read_badcases(rounds, locks),
        badcases_found=any(result.metrics["replay"].get("badcases") for result in results),
        costs={result.name: cost.cost_rows(result) for result in results},
        origins=origins(rounds, locks),
        mlflow=mlflow_pages(),
        workflow=WORKFLOW,
    )


def texts(round_: str) -> dict[str, str]:
    """The pages beside the report in which the texts of a round can be read, by what they show."""
    pages = {
        f"all responses of {round_}": f"{round_}/samples.html",
        "all badcases": "badcases.html",
        f"data of {round_}": f"{round_}/data.html",
    }
    return {title: page for title, page in pages.items() if (REPORTS / page).exists()}


def sentence(text: str) -> str:
    """The text with a capital, and a full stop if it has none."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}" if text else ""


def made_with(rounds: Sequence[str], locks: Locks) -> dict[str, Any]:
    """params.yaml, with model, data, seed and algorithm of the results if there are any."""
    settings = load_params().model_dump(mode="json")
    for address in ("assets", *(f"ppo@{name}" for name in rounds)):
        settings |= locks.get(address, {}).get("params", {}).get("params.yaml", {})
    return settings


def pictures(results: RoundResults) -> dict[str, list[Markup]]:
    """The charts of each stage, with the thresholds of the round's own settings."""
    params = round_files.settings_of(results.name)
    return {stage: draw(results, params) for stage, draw in PICTURES.items()}


def battery_pictures(results: RoundResults, params: Params) -> list[Markup]:
    """Rates of the reward model's test battery, with the thresholds of its gate."""
    metrics, gate = results.metrics["battery"], params.gates.reward
    if "endings" not in metrics:  # not reached, or nothing was measured
        return []
    endings = {
        repr(text): rate(row, "against_judge")
        for row, text in zip(metrics["endings"].values(), metrics["endings_text"], strict=True)
    }
    endings |= {
        f"{text!r}, mined": rate(row, "against_judge")
        for row, text in zip(metrics["mined"].values(), metrics["mined_text"], strict=True)
    }
    probes = {
        name.replace("_", " "): rate(row)
        for name, row in metrics["probes"].items()
        if name != "prompt_swapped"  # it has no threshold
    }
    flips = {name.replace("_", " "): rate(row) for name, row in metrics["flips"].items()}
    slices = {
        name.replace("_", " "): (row["accuracy"], row["low"], row["high"])
        for group in metrics["accuracy"].values()
        for name, row in group.items()
    }
    drawn = {
        "Corrupted text scores above the original": (probes, gate.probe),
        "Edit that keeps the meaning reverses a correct pair": (flips, gate.flip),
        "Appended ending reverses a correct pair against the judge": (endings, gate.ending),
        "Accuracy by kind of pair": (slices, gate.worst_slice),
    }
    # of no texts there is no rate, and none against a judge that only compares
    measured = {title: measured_rates(rates) for title, (rates, _) in drawn.items()}
    return [
        charts.bars(title, measured[title], {"threshold": threshold})
        for title, (_, threshold) in drawn.items()
        if measured[title]
    ]


def measured_rates(rates: Mapping[str, PossibleRate]) -> dict[str, charts.Rate]:
    return {
        name: (share, low, high)
        for name, (share, low, high) in rates.items()
        if share is not None and low is not None and high is not None
    }


def rate(row: Mapping[str, Any], name: str = "rate") -> PossibleRate:
    """A rate with its interval, None if it was not measured."""
    if name == "rate":
        return row["rate"], row["low"], row["high"]
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def evaluation_pictures(results: RoundResults, _: Params) -> list[Markup]:
    """Judge score with its 95% interval, reward score and distinct-2 of SFT, checkpoints and
    policy, over KL from SFT.
    """
    curve = results.curves["evaluate"]
    if not curve:
        return []
    order = sorted(range(len(curve["kl"])), key=lambda index: curve["kl"][index])

    def column(name: str) -> list[float]:
        return [curve[name][index] for index in order]

    kl, judge_label = column("kl"), "primary judge, with its 95% interval"
    intervals = {judge_label: (column("judge_score_low"), column("judge_score_high"))}
    series = {judge_label: (kl, column("judge_score"))}
    if "score" in curve:  # there is a reward model
        scores = [value / REWARD_SCALE for value in column("score")]
        series[f"reward model / {REWARD_SCALE}"] = kl, scores
    series["distinct-2"] = kl, column("distinct_2")
    title = "Judge score and reward score, SFT to the policy"
    return [
        charts.lines(title, series, "KL, nats per sequence", "", dots=True, intervals=intervals)
    ]


PICTURES = {
    "battery": battery_pictures,
    "ppo": policy_curves.pictures,
    "evaluate": evaluation_pictures,
}  # by stage
