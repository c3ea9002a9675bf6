"""reports/report.html: the story, and below it what it rests on."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flows.core.git import revision
from flows.core.services import MLFLOW_PAGES
from flows.core.tables import short
from flows.report import charts, cost, policy_curves, summary
from flows.report.lineage import origins
from flows.report.round_data import Round, read_badcases, read_round
from flows.tracking.records import read_locks
from stages.lib.core.files import REPORTS, write_text
from stages.lib.core.html import render_page
from stages.lib.core.params import Params, load_params
from stages.lib.data.prompts import transcript
from stages.ppo.common.health import WINDOW

REPORT = REPORTS / "report.html"
PROXY_SCALE = 4  # the reward model's score is some four times the judge's


def write(rounds: Sequence[str]) -> Path:
    """The report of these rounds; returns where it is."""
    params, locks = load_params(), read_locks()
    told = [read_round(name, locks) for name in rounds]
    page = render_page(
        "flows.report",
        "report.html.jinja",
        {"said": said, "prompt": said_prompt, "number": number, "short": short},
        stages=summary.STAGES,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        revision=revision(),
        params=params,
        rounds=told,
        verdicts=dict(zip(rounds, summary.verdict(list(rounds)), strict=True)),
        table=summary.rows(list(rounds)),
        notes=summary.not_comparable(list(rounds)),
        charts={
            each.name: {stage: draw(each, params) for stage, draw in PICTURES.items()}
            for each in told
        },
        window=WINDOW,
        badcases=read_badcases(rounds),
        costs={each.name: cost.lines(each) for each in told},
        origins=origins(rounds, locks),
        mlflow=MLFLOW_PAGES,
    )
    write_text(REPORT, page)
    return REPORT


def battery(told: Round, params: Params) -> list[Markup]:
    found, gate = told.metrics["battery"], params.gates.reward
    if not found:
        return []
    endings = {
        repr(text): rate(row)
        for row, text in zip(found["endings"].values(), found["endings_text"], strict=True)
    }
    endings |= {
        f"{text!r}, mined": rate(row)
        for row, text in zip(found["mined"].values(), found["mined_text"], strict=True)
    }
    probes = {
        name.replace("_", " "): rate(row)
        for name, row in found["probes"].items()
        if name != "prompt_swapped"
    }  # which has no band
    sides = {
        f"{side.replace('_', ' ')}": (row["accuracy"], row["low"], row["high"])
        for group in found["accuracy"].values()
        for side, row in group.items()
    }
    return [
        charts.bars("A broken text beats the whole one", probes, {"band": gate.probe}),
        charts.bars("An ending turns a right pair", endings, {"band": gate.ending}),
        charts.bars("Accuracy by kind of pair", sides, {"band": gate.worst_slice}),
    ]


def rate(row: Mapping[str, Any]) -> charts.Rate:
    return row["rate"], row["low"], row["high"]


def against_kl(told: Round, _: Params) -> list[Markup]:
    curve = told.curves["evaluate"]
    if not curve:
        return []
    order = sorted(range(len(curve["kl"])), key=lambda place: curve["kl"][place])
    kl, judge, proxy, distinct = (
        [curve[name][place] for place in order]
        for name in ("kl", "sentiment", "score", "distinct_2")
    )
    series = {
        "judge": (kl, judge),
        f"reward model / {PROXY_SCALE}": (kl, [value / PROXY_SCALE for value in proxy]),
        "distinct-2": (kl, distinct),
    }
    return [
        charts.lines(
            "Judge against reward model, SFT to the policy",
            series,
            "KL, nats a sequence",
            "",
            dots=True,
        )
    ]


PICTURES = {"battery": battery, "ppo": policy_curves.pictures, "evaluate": against_kl}  # by stage


def said(text: Any) -> str:
    """A model's text, so that what cannot be seen is."""
    return "not asked" if text is None else str(text).replace("\n", " ↵ ") or "(nothing)"


def said_prompt(prompt: str | list[dict[str, str]]) -> str:
    return said(prompt if isinstance(prompt, str) else transcript(prompt).strip())


def number(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
