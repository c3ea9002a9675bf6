"""How the policy learnt: its curves, on them the bands of PPO's health, what was found and when,
and the policy that was kept.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from markupsafe import Markup

from flows.report import charts
from flows.report.round_data import Round
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import SIGNS, WINDOW, HealthCheck

Curves = Mapping[str, Sequence[float]]
# title, columns, unit
CURVES = (
    ("Reward model's score", ("score_mean",), "standard deviations"),
    ("Reward: score less KL", ("reward_mean",), "standard deviations"),
    ("Judge, which the policy does not see", ("judge_mean", "validation_judge"), "sentiment"),
    ("Do judge and reward model agree?", ("score_judge_correlation",), "correlation"),
    ("KL from SFT", ("kl", "validation_kl"), "nats a sequence"),
    ("Length", ("response_length",), "tokens"),
    ("Variety across prompts", ("distinct_2",), "share"),
    ("Same endings, repeats", ("ending_share", "repetition_3"), "share"),
    ("Entropy", ("entropy",), "nats a token"),
    ("Loss of the critic", ("value_loss",), ""),
    ("Clipped", ("clip_fraction",), "share of tokens"),
)
# What a sign compares with its number, as its metric says after the comma: where that is on the
# curve. values: the curve's.
RELATIONS: Mapping[str, Callable[[float, Sequence[float], Curves], float]] = {
    "": lambda number, values, curves: number,
    "last / first": lambda number, values, curves: number * first(values),
    "last / median": lambda number, values, curves: number * median(values),
    "rise": lambda number, values, curves: number + first(values),
    "rise in standard deviations": lambda number, values, curves: (
        number * first(curves["reward_std"]) + first(values)
    ),
}


def pictures(told: Round, params: Params) -> list[Markup]:
    """The curves that were measured."""
    curves, drawn = told.curves["ppo"], []
    for title, columns, unit in CURVES:
        series = {column: points for column in columns if (points := measured(curves, column))}
        if series:
            dots = any("validation" in column for column in columns)
            drawn.append(
                charts.lines(title, series, "update", unit, marks(told, columns, params.ppo), dots)
            )
    return drawn


def marks(told: Round, columns: Sequence[str], params: PpoParams) -> charts.Marks:
    """What the picture of these columns is marked with."""
    curves = told.curves["ppo"]
    bounds = {sign.name: bound(sign, curves, params) for sign in SIGNS if sign.column in columns}
    kept = told.metrics["ppo"].get("policy_update")
    spots = {}
    for finding in told.findings:
        column = finding["metric"].split()[0].rstrip(",")
        at = dict(zip(*(measured(curves, column) or ((), ())), strict=True)).get(finding["update"])
        if column in columns and at is not None:
            spots[f"{finding['verdict']}: {finding['sign']}, update {finding['update']}"] = (
                finding["update"],
                at,
            )
    return charts.Marks(
        bounds={
            f"{name}: {value:.4g}": value for name, value in bounds.items() if value is not None
        },
        moments={} if kept is None else {f"kept: update {kept}": kept},
        spots=spots,
    )


def bound(sign: HealthCheck, curves: Curves, params: PpoParams) -> float | None:
    """Where on its curve the band of a sign ends, for the mean of WINDOW updates; None where it had
    too few updates to be read.
    """
    _, _, relation = sign.metric.partition(", ")
    _, values = measured(curves, sign.column) or ((), ())
    if relation and len(values) < sign.after:
        return None
    return RELATIONS[relation](limit(sign.band, params), values, curves)


def limit(band: str, params: PpoParams) -> float:
    """The number of a band: `at most ppo.max_kl nats` is that of params.yaml, `0.75 or more` says
    it.
    """
    found = re.search(r"ppo\.(\w+)|[\d.]+", band)
    assert found, band
    return float(getattr(params, found[1]) if found[1] else found[0])


def first(values: Sequence[float]) -> float:
    return fmean(values[:WINDOW])


def measured(curves: Curves, name: str) -> charts.Points | None:
    """A column by step, where it was measured."""
    both = [
        (x, y)
        for x, y in zip(curves.get("step", ()), curves.get(name, ()), strict=False)
        if not math.isnan(y)
    ]
    return ([x for x, _ in both], [y for _, y in both]) if both else None
