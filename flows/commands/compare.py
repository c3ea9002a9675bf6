"""`rondo compare RUN RUN`: the policies of two recorded runs, paired on the same evaluation
prompts, and the settings in which the runs differ.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.services import WORKFLOW, mlflow_pages
from flows.core.tables import fitted_text, interval, short_hash, shortened, terminal_width
from flows.report import summary
from flows.report.samples import (
    OUTCOMES,
    SampleView,
    difference,
    known,
    render_samples,
    side_by_side,
)
from flows.report.texts import prompt_text, visible_text
from stages.evaluate.comparability import differences
from stages.lib.core.errors import BadInput
from stages.lib.core.files import REPORTS
from stages.lib.core.rows import EvaluationSample
from stages.lib.metrics.stats import paired_bootstrap

PAGE = REPORTS / "compare.html"
SHOWN_SAMPLES = 3  # in the terminal; the page has all
RESAMPLES = 10_000
HASH = re.compile(r"\b[0-9a-f]{32,64}\b")
METRICS = {  # row title -> metric of the evaluation in MLflow
    "win rate against SFT": "final/win_rate",
    "KL from SFT, nats": "final/ppo/kl",
    "reward model's score": "final/ppo/score",
    "response length, tokens": "final/ppo/length",
    "responses that end": "final/ppo/eos_rate",
    "distinct-2": "final/ppo/distinct_2",
    "repeated 3-grams": "final/ppo/repetition_3",
    "loss on human texts over SFT, nats per token": "final/human_nll_rise",
}


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run's round.

    name: RUN:ROUND. samples: its rows by prompt id and sample number. settings: by key of
    params.yaml.
    """

    name: str
    run: Run
    samples: Mapping[tuple[str, int], EvaluationSample]
    settings: Mapping[str, Any]


def find(client: MlflowClient, experiment: str, wanted: str) -> Evaluation:
    """The recorded evaluation of a run.

    Args:
        wanted: RUN or RUN:ROUND; RUN is a run's name or the beginning of it. Without a round it is
            the last one that the run evaluated.

    Raises:
        BadInput: no run with an evaluation matches, or several do, or it did not evaluate the
            round; the message lists the known ones.
    """
    prefix, _, round_ = wanted.partition(":")
    evaluations = client.search_runs(
        [experiment],
        "tags.stage = 'evaluate' and attributes.status = 'FINISHED'",
        order_by=["start_time DESC"],
    )
    names = list(dict.fromkeys(run.data.tags["rondo.run"] for run in evaluations))
    # A whole name is unique even if other names begin with it
    matches = [prefix] if prefix in names else [name for name in names if name.startswith(prefix)]
    if len(matches) != 1:
        problem = "several runs match" if matches else "no such run with an evaluation"
        known = ", ".join(matches or names[:10]) or "none: `rondo run` records one"
        raise BadInput(f"{wanted}: {problem}; there are {known}")
    [name] = matches
    rounds = {
        run.data.tags["round"]: run for run in evaluations if run.data.tags["rondo.run"] == name
    }
    chosen = round_ or max(rounds, key=lambda known_round: (len(known_round), known_round))
    if chosen not in rounds:
        raise BadInput(f"{wanted}: run {name} evaluated {', '.join(sorted(rounds))}")
    run = rounds[chosen]
    table = read(run, "samples.json")
    columns = table["columns"]
    rows: list[EvaluationSample] = [
        cast(EvaluationSample, dict(zip(columns, row, strict=True))) for row in table["data"]
    ]
    return Evaluation(
        name=f"{name}:{chosen}",
        run=run,
        samples={(row["id"], row["sample"]): row for row in rows},
        settings=read(run, "manifest.json")["evaluation"],
    )


def read(run: Run, artifact: str) -> Any:
    return mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/{artifact}")


def paired(a: Evaluation, b: Evaluation) -> dict[str, tuple[float, float, float]]:
    """B against A on the evaluation prompts, as (mean, low, high) over prompts.

    The score is that of the primary judge, whatever other judges were in the jury.

    Raises:
        BadInput: the evaluations had different settings, so their samples are not paired.
    """
    if changed := differences(a.settings, b.settings):
        shown = HASH.sub(lambda hash_: short_hash(hash_[0]), "; ".join(changed))
        raise BadInput(
            f"{a.name} and {b.name} were evaluated with different settings ({shown}), "
            "so that their numbers cannot be compared: run one of them again with the settings of "
            "the other"
        )
    margin, seed = a.settings["evaluate.tie_margin"], a.settings["seed"]
    gains: dict[str, list[float]] = {}
    for key in a.samples:
        gains.setdefault(key[0], []).append(judge_gain(a, b, key))
    wins = [
        [0.5 if abs(gain) < margin else float(gain > 0) for gain in gains_of_prompt]
        for gains_of_prompt in gains.values()
    ]
    return {
        "judge score, B - A [95%]": paired_bootstrap(list(gains.values()), RESAMPLES, seed),
        "share of samples higher in B, ties half [95%]": paired_bootstrap(wins, RESAMPLES, seed),
    }


def settings(client: MlflowClient, evaluation: Evaluation) -> dict[str, str]:
    """The params of the run's stages in this round and of those that all rounds share, and the
    commit.
    """
    run, tags = evaluation.run, evaluation.run.data.tags
    runs = client.search_runs([run.info.experiment_id], f"tags.`rondo.run` = '{tags['rondo.run']}'")
    stages = [stage for stage in runs if stage.data.tags.get("round") in ("", tags["round"])]
    params = {key: value for stage in stages for key, value in stage.data.params.items()}
    return params | {"git": tags.get("revision", "-")}


def values(client: MlflowClient, a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """For programs: names, `metrics` of A and B, `gains` of B over A as (mean, low, high), and the
    `settings` of A and B that differ.

    Raises:
        BadInput: see `paired`.
    """
    settings_a, settings_b = settings(client, a), settings(client, b)
    return {
        "a": a.name,
        "b": b.name,
        "metrics": {
            title: [evaluation.run.data.metrics.get(key) for evaluation in (a, b)]
            for title, key in METRICS.items()
        },
        "gains": paired(a, b),
        "settings": {
            key: [settings_a.get(key, "-"), settings_b.get(key, "-")]
            for key in sorted({*settings_a, *settings_b})
            if settings_a.get(key) != settings_b.get(key)
        },
    }


def text(client: MlflowClient, a: Evaluation, b: Evaluation) -> str:
    """A table: metrics of both, B against A with intervals, and the settings that differ.

    Raises:
        BadInput: see `paired`.
    """
    shown = values(client, a, b)
    metrics = [(title, *map(format_metric, pair)) for title, pair in shown["metrics"].items()]
    gains = [(title, "", interval(*gain)) for title, gain in shown["gains"].items()]
    changed = [(key, *pair) for key, pair in shown["settings"].items()]
    table = Table(box=SIMPLE_HEAD)
    for column in ("", f"A = {a.name}", f"B = {b.name}"):
        table.add_column(column, justify="right" if column else "left")
    for row in [*metrics, *gains]:
        table.add_row(*row)
    table.add_section()
    for row in changed or [("the settings are the same", "", "")]:
        table.add_row(*row)
    return fitted_text(table, terminal_width(), keep=len(table.columns))


def write_page(a: Evaluation, b: Evaluation) -> Path:
    """Write the page of all samples of both policies, and return its path."""
    title = f"{a.name} and {b.name}"
    about = f"The responses of two policies to the same prompts: A is {a.name}, B is {b.name}."
    choices = {"show": ("judge", {name: f"B {name} against A" for name in OUTCOMES.values()})}
    views = [view(a, b, key) for key in a.samples]
    summary.replace_text(
        PAGE, lambda: render_samples(title, about, views, ("A", "B"), choices, "report.html")
    )
    return PAGE


def view(a: Evaluation, b: Evaluation, key: tuple[str, int]) -> SampleView:
    """The two responses to a prompt. Gains are those from A to B, KL and length those of B."""
    before, after = a.samples[key], b.samples[key]
    gain = judge_gain(a, b, key)
    outcome = 0.5 if abs(gain) < a.settings["evaluate.tie_margin"] else float(gain > 0)
    return SampleView(
        id=f"{key[0]}-{key[1]}",
        prompt=before["prompt"],
        responses=side_by_side([("A", before, "ppo"), ("B", after, "ppo")], ("A", "B")),
        facts={"show": OUTCOMES[outcome]},
        numbers=known(
            judge=gain,
            reward=difference(before.get("ppo_score"), after.get("ppo_score")),
            kl=after.get("ppo_kl"),
            length=after.get("ppo_length"),
        ),
    )


def judge_gain(a: Evaluation, b: Evaluation, key: tuple[str, int]) -> float:
    return b.samples[key]["ppo_judge_score"] - a.samples[key]["ppo_judge_score"]


def largest_differences(a: Evaluation, b: Evaluation) -> str:
    """The samples whose judge scores differ most, each text in one line."""
    keys = sorted(a.samples, key=lambda key: -abs(judge_gain(a, b, key)))[:SHOWN_SAMPLES]
    lines = ["Largest differences of the judge's score, B - A:"]
    for key in keys:
        before, after = a.samples[key], b.samples[key]
        lines.append(
            f"{judge_gain(a, b, key):+.3f}  {key[0]}-{key[1]}: {prompt_text(before['prompt'])}"
        )
        lines += [f"  A: {visible_text(before['ppo'])}", f"  B: {visible_text(after['ppo'])}"]
    return "\n".join(shortened(line, terminal_width()) for line in lines)


def format_metric(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def pages(client: MlflowClient, a: Evaluation, b: Evaluation) -> dict[str, str]:
    """Addresses of MLflow's pages about the evaluations, by their content; empty if the store has
    no pages.
    """
    server = mlflow_pages()
    if not server:
        return {}
    experiment = a.run.info.experiment_id
    ids = json.dumps([one.run.info.run_id for one in (a, b)], separators=(",", ":"))
    curves = ",".join(f"'{run}'" for run in runs_with_curves(client, a, b))
    curve_filter = quote(f"attributes.run_id IN ({curves})")
    return {
        "the same numbers": (
            f"{server}/#/compare-runs?runs={quote(ids)}"
            f"&experiments={quote(json.dumps([experiment]))}&{WORKFLOW}"
        ),
        "PPO's curves": (
            f"{server}/#/experiments/{experiment}/runs?searchFilter={curve_filter}"
            f"&compareRunsMode=CHART&{WORKFLOW}"
        ),
    }


def runs_with_curves(client: MlflowClient, a: Evaluation, b: Evaluation) -> list[str]:
    """The MLflow runs whose curves of PPO have the same names, so that a chart overlays them: the
    pipeline runs, or if both rounds are of one, its runs of the stage `ppo`.
    """
    parents = [one.run.data.tags[MLFLOW_PARENT_RUN_ID] for one in (a, b)]
    if parents[0] != parents[1]:
        return parents
    query = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parents[0]}' and tags.stage = 'ppo'"
    stages = client.search_runs([a.run.info.experiment_id], query)
    rounds = {one.run.data.tags["round"] for one in (a, b)}
    return [run.info.run_id for run in stages if run.data.tags["round"] in rounds]
