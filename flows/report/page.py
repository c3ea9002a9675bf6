"""reports/report.html: each round's verdict and next step, then the numbers behind it."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from flows.core.bookkeeping import bookkeeping
from flows.core.git import revision
from flows.core.locks import Locks, is_here
from flows.core.services import LogLine
from flows.core.tables import format_number, short_hash
from flows.execution.worktree import run_of_folder
from flows.report import (
    badcases,
    charts,
    cost,
    diagnosis,
    round_files,
    run_pages,
    samples,
    summary,
)
from flows.report.charts import Chart, Look
from flows.report.lineage import origins
from flows.report.pictures import PICTURES
from flows.report.round_data import RoundResults, read_badcases, read_round
from flows.report.texts import prompt_text, visible_text
from stages.lib.core.files import REPORTS
from stages.lib.core.html import render_page
from stages.lib.core.params import load_params
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


class RoundKey(NamedTuple):
    """How a round is drawn, whether it is shown at first, and the update of its policy."""

    name: str
    look: Look
    shown: bool
    selected: int | None


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
    charts_by_stage = charts_of_stages(results)
    specs = [chart.spec for drawn in charts_by_stage.values() for chart in drawn]
    return render_page(
        "flows.report",
        "report.html.jinja",
        {
            "visible": visible_text,
            "prompt": prompt_text,
            "number": format_number,
            "short": short_hash,
            "sentence": sentence,
            "code": code,
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
        complete=all(is_here(lock) for result in results for lock in result.locks.values()),
        table=summary.rows(names, locks),
        notes=summary.notes(names, locks),
        charts=charts_by_stage,
        chart_data={"config": charts.CONFIG, "specs": specs},
        library=Markup(charts.library()) if specs else "",
        round_keys=round_keys(results),
        window=WINDOW,
        terms=TERMS,
        badcases=read_badcases(rounds, locks),
        badcases_found=any(result.metrics["replay"].get("badcases") for result in results),
        costs={result.name: cost.cost_rows(result) for result in results},
        origins=origins(rounds, locks),
        pages=run_pages.addresses_here(),
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


def code(text: str) -> Markup:
    """The text with `commands and keys` as HTML's <code>."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def made_with(rounds: Sequence[str], locks: Locks) -> dict[str, Any]:
    """params.yaml, with model, data, seed and algorithm of the results if there are any."""
    settings = load_params().model_dump(mode="json")
    for address in ("assets", *(f"ppo@{name}" for name in rounds)):
        settings |= locks.get(address, {}).get("params", {}).get("params.yaml", {})
    return settings


def charts_of_stages(results: Sequence[RoundResults]) -> dict[str, list[Chart]]:
    """With the thresholds of each round's own settings."""
    rounds = [(result, round_files.settings_of(result.name)) for result in results]
    return {stage: draw(rounds) for stage, draw in PICTURES.items()}


def round_keys(results: Sequence[RoundResults]) -> list[RoundKey]:
    return [
        RoundKey(result.name, charts.look(number), number >= len(results) - charts.SHOWN, policy)
        for number, result in enumerate(results)
        for policy in [result.metrics["ppo"].get("policy_update")]
    ]
