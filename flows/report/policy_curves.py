"""Charts of PPO's training: its metrics by update, with the thresholds of the health checks, their
findings, and the update of the selected policy.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from markupsafe import Markup

from flows.report import charts
from flows.report.round_data import RoundResults
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import HEALTH_CHECKS, WINDOW, HealthCheck

Curves = Mapping[str, Sequence[float]]
# title, columns of curves.csv, unit
CURVES = (
    ("Reward model's score", ("score_mean",), "standard deviations"),
    ("Reward: scores and penalties, no KL", ("reward_mean",), "standard deviations"),
    ("Judge score (not in the reward)", ("judge_score_mean", "validation_judge_score"), ""),
    ("Judge score and reward score: correlation", ("score_judge_correlation",), "correlation"),
    ("Judge score's gain over SFT", ("validation_gain_z",), "standard errors"),
    ("KL from SFT per token", ("kl_per_token", "validation_kl_per_token"), "nats"),
    ("KL from SFT per sequence", ("kl", "validation_kl"), "nats"),
    ("Response length", ("response_length",), "tokens"),
    ("Variety across prompts", ("distinct_2",), "share"),
    ("Shared endings and repetition", ("ending_share", "repetition_3"), "share"),
    ("Entropy", ("entropy",), "nats per token"),
    ("Critic loss", ("value_loss",), ""),
    ("Clipped ratios", ("clip_fraction",), "share of tokens"),
)
# A health check's metric is `column` or `column, relation`. If there is a relation, its threshold
# is relative to the start of the run: these functions return where it is on the curve itself, from
# the threshold, the curve's values and all curves.
RELATIONS: Mapping[str, Callable[[float, Sequence[float], Curves], float]] = {
    "": lambda threshold, values, curves: threshold,
    "last / first": lambda threshold, values, curves: threshold * first(values),
    "last / median": lambda threshold, values, curves: threshold * median(values),
    "rise": lambda threshold, values, curves: threshold + first(values),
    "rise in standard deviations": lambda threshold, values, curves: (
        threshold * first(curves["reward_std"]) + first(values)
    ),
}


def pictures(results: RoundResults, params: Params) -> list[Markup]:
    """A chart for each entry of CURVES that was measured."""
    curves, drawn = results.curves["ppo"], []
    for title, columns, unit in CURVES:
        series = {column: curve for column in columns if (curve := measured(curves, column))}
        if series:
            dots = any("validation" in column for column in columns)
            column_marks = marks(results, columns, params.ppo)
            drawn.append(charts.lines(title, series, "update", unit, column_marks, dots))
    return drawn


def marks(results: RoundResults, columns: Sequence[str], params: PpoParams) -> charts.Marks:
    """Thresholds, findings and the selected update, for the chart of these columns."""
    curves = results.curves["ppo"]
    bounds = {
        check.name: bound(check, curves, params)
        for check in HEALTH_CHECKS
        if check.column in columns
    }
    selected = results.metrics["ppo"].get("policy_update")
    points = {}
    for finding in results.findings:
        column = finding["metric"].split()[0].rstrip(",")
        update = finding["update"]
        values_by_update = dict(zip(*(measured(curves, column) or ((), ())), strict=True))
        value = values_by_update.get(update)
        if column in columns and value is not None:
            points[f"{finding['verdict']}: {finding['sign']}, update {update}"] = (update, value)
    return charts.Marks(
        bounds={
            f"{name}: {value:.4g}": value for name, value in bounds.items() if value is not None
        },
        updates={} if selected is None else {f"selected: update {selected}": selected},
        points=points,
    )


def bound(check: HealthCheck, curves: Curves, params: PpoParams) -> float | None:
    """The threshold of a health check as a height on its curve, for the mean of WINDOW updates.

    None if the threshold is relative to the start and there were too few updates for the check.
    """
    _, _, relation = check.metric.partition(", ")
    _, values = measured(curves, check.column) or ((), ())
    if relation and len(values) < check.min_updates:
        return None
    return RELATIONS[relation](threshold_value(check.threshold, params), values, curves)


def threshold_value(threshold: str, params: PpoParams) -> float:
    """The number in a threshold: `at most ppo.max_kl_per_token nats` names a key of
    params.yaml, `0.75 or more` contains the number.
    """
    match = re.search(r"ppo\.(\w+)|-?[\d.]+", threshold)
    assert match, threshold
    return float(getattr(params, match[1]) if match[1] else match[0])


def first(values: Sequence[float]) -> float:
    return fmean(values[:WINDOW])


def measured(curves: Curves, column: str) -> charts.Curve | None:
    """Updates and values of a column, without the updates at which it was not measured."""
    points = [
        (update, value)
        for update, value in zip(curves.get("step", ()), curves.get(column, ()), strict=False)
        if not math.isnan(value)
    ]
    return ([update for update, _ in points], [value for _, value in points]) if points else None
