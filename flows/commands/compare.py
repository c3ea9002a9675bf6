"""`rondo compare RUN RUN`: the policies of two recorded runs on the same frozen prompts, paired;
and what the runs had differently.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.services import MLFLOW_URL, WORKFLOW
from flows.core.tables import drawn, interval
from stages.evaluate.comparability import differences
from stages.lib.core.errors import BadInput
from stages.lib.core.types import Row
from stages.lib.metrics.stats import paired_bootstrap

RESAMPLES = 10_000
NUMBERS = {  # of the evaluation, by what they are called here
    "win rate against SFT": "final/win_rate",
    "KL from SFT, nats": "final/ppo/kl",
    "reward model's score": "final/ppo/score",
    "response length, tokens": "final/ppo/length",
    "responses that end": "final/ppo/eos_rate",
    "distinct-2": "final/ppo/distinct_2",
    "repeated 3-grams": "final/ppo/repetition_3",
    "people's texts, rise over SFT, nats a token": "final/human_nll_rise",
}


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run's round. name: RUN:ROUND. samples: its rows by prompt and number;
    settings: by key of params.yaml.
    """

    name: str
    run: Run
    samples: Mapping[tuple[str, int], Row]
    settings: Mapping[str, Any]


def find(client: MlflowClient, experiment: str, wanted: str) -> Evaluation:
    """`wanted`: RUN or RUN:ROUND, the name of a run or its beginning; without a round the last one
    that it evaluated.

    Raises:
        BadInput: no such run, several, or none of its evaluations was recorded; names those that
            there are.
    """
    name, _, round_ = wanted.partition(":")
    known = client.search_runs(
        [experiment],
        "tags.stage = 'evaluate' and attributes.status = 'FINISHED'",
        order_by=["start_time DESC"],
    )
    names = list(dict.fromkeys(run.data.tags["rondo.run"] for run in known))
    fitting = [each for each in names if each == name] or [
        each for each in names if each.startswith(name)
    ]
    if len(fitting) != 1:
        said = "several runs begin so" if fitting else "no such run with an evaluation"
        raise BadInput(
            f"{wanted}: {said}; there are {', '.join(fitting or names[:10]) or 'none: `rondo run` records one'}"
        )
    rounds = {
        run.data.tags["round"]: run for run in known if run.data.tags["rondo.run"] == fitting[0]
    }
    chosen = round_ or max(rounds, key=lambda each: (len(each), each))
    if chosen not in rounds:
        raise BadInput(f"{wanted}: run {fitting[0]} has evaluated {', '.join(sorted(rounds))}")
    run = rounds[chosen]
    table = read(run, "samples.json")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return Evaluation(
        f"{fitting[0]}:{chosen}",
        run,
        {(row["id"], row["sample"]): row for row in rows},
        read(run, "manifest.json")["evaluation"],
    )


def read(run: Run, artifact: str) -> Any:
    return mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/{artifact}")


def paired(a: Evaluation, b: Evaluation) -> dict[str, tuple[float, float, float]]:
    """B against A on the frozen prompts, each (mean, low, high) over prompts: judged sentiment,
    whoever else was in the jury.

    Raises:
        BadInput: the evaluations were set otherwise, so that nothing is paired.
    """
    if found := differences(a.settings, b.settings):
        raise BadInput(
            f"{a.name} and {b.name} were evaluated otherwise ({'; '.join(found)}), so that their numbers cannot be compared: "
            "run one of them again with the other's"
        )
    margin, seed = a.settings["evaluate.tie_margin"], a.settings["seed"]
    gains: dict[str, list[float]] = {}
    for (prompt, number), row in a.samples.items():
        gains.setdefault(prompt, []).append(
            b.samples[prompt, number]["ppo_sentiment"] - row["ppo_sentiment"]
        )
    wins = [
        [0.5 if abs(gain) < margin else float(gain > 0) for gain in each] for each in gains.values()
    ]
    return {
        "judged sentiment (VADER), B - A [95%]": paired_bootstrap(
            list(gains.values()), RESAMPLES, seed
        ),
        "how often B's is higher, ties half [95%]": paired_bootstrap(wins, RESAMPLES, seed),
    }


def settings(client: MlflowClient, of: Evaluation) -> dict[str, str]:
    """What the run's stages were set to, up to the round's evaluation; with its commit."""
    run, tags = of.run, of.run.data.tags
    found = client.search_runs(
        [run.info.experiment_id], f"tags.`rondo.run` = '{tags['rondo.run']}'"
    )
    stages = [each for each in found if each.data.tags.get("round") in ("", tags["round"])]
    return {key: value for each in stages for key, value in each.data.params.items()} | {
        "git": tags.get("revision", "-")
    }


def text(client: MlflowClient, a: Evaluation, b: Evaluation) -> str:
    """A is better by what, and what was otherwise.

    Raises:
        BadInput: see `paired`.
    """
    rows = [
        (name, *(shown(each.run.data.metrics.get(key)) for each in (a, b)))
        for name, key in NUMBERS.items()
    ]
    told = [(name, "", interval(*found)) for name, found in paired(a, b).items()]
    ours, theirs = settings(client, a), settings(client, b)
    otherwise = [
        (key, ours.get(key, "-"), theirs.get(key, "-"))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
    table = Table(box=SIMPLE_HEAD)
    for column in ("", f"A = {a.name}", f"B = {b.name}"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in [*rows, *told]:
        table.add_row(*row)
    table.add_section()
    for row in otherwise or [("nothing was set otherwise", "", "")]:
        table.add_row(*row)
    return drawn(table)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def pages(*evaluations: Evaluation) -> dict[str, str]:
    """MLflow's pages of the two, by what they show."""
    experiment = evaluations[0].run.info.experiment_id
    runs = json.dumps([each.run.info.run_id for each in evaluations], separators=(",", ":"))
    parents = ",".join(
        dict.fromkeys(f"'{each.run.data.tags[MLFLOW_PARENT_RUN_ID]}'" for each in evaluations)
    )
    these = quote(f"attributes.run_id IN ({parents})")
    return {
        "the same numbers": f"{MLFLOW_URL}/#/compare-runs?runs={runs}&experiments={json.dumps([experiment])}&{WORKFLOW}",
        "PPO's curves": f"{MLFLOW_URL}/#/experiments/{experiment}/runs?searchFilter={these}&compareRunsMode=CHART&{WORKFLOW}",
    }
