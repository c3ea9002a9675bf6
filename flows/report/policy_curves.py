"""Charts of PPO's training: its metrics by update, with the thresholds of the health checks, their
findings, and the update of the selected policy.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, median

from flows.report import line_charts
from flows.report.charts import Chart
from flows.report.line_charts import FINDING, SELECTED, Bound, Curve, Mark
from flows.report.round_data import RoundResults
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import HEALTH_CHECKS, WINDOW, HealthCheck

Columns = Mapping[str, Sequence[float]]
TRAINING, VALIDATION = "training", "validation"
# title, column of curves.csv by series, y axis
PANELS: Sequence[tuple[str, Mapping[str, str], str]] = (
    ("Reward model's score", {TRAINING: "score_mean"}, "standard deviations"),
    ("Reward: scores and penalties, no KL", {TRAINING: "reward_mean"}, "standard deviations"),
    (
        "Judge score (not in the reward)",
        {TRAINING: "judge_score_mean", VALIDATION: "validation_judge_score"},
        "judge score",
    ),
    (
        "Judge score and reward score: correlation",
        {TRAINING: "score_judge_correlation"},
        "correlation",
    ),
    ("Judge score's gain over SFT", {VALIDATION: "validation_gain_z"}, "standard errors"),
    (
        "KL from SFT per token",
        {TRAINING: "kl_per_token", VALIDATION: "validation_kl_per_token"},
        "nats",
    ),
    ("KL from SFT per sequence", {TRAINING: "kl", VALIDATION: "validation_kl"}, "nats"),
    ("Response length", {TRAINING: "response_length"}, "tokens"),
    ("Variety across prompts", {TRAINING: "distinct_2"}, "distinct-2 (share)"),
    ("Most frequent ending", {TRAINING: "ending_share"}, "share of responses"),
    ("Repetition within a response", {TRAINING: "repetition_3"}, "share of 3-grams"),
    ("Entropy", {TRAINING: "entropy"}, "nats per token"),
    ("Critic loss", {TRAINING: "value_loss"}, "squared error"),
    ("Returns that the critic explains", {TRAINING: "explained_variance"}, "share of variance"),
    ("Clipped ratios", {TRAINING: "clip_fraction"}, "share of tokens"),
)
NUMBER_OR_KEY = re.compile(r"ppo\.(\w+)|-?[\d.]+")  # in a threshold
# A health check's metric is `column` or `column, relation`. If there is a relation, its threshold
# is relative to the start of the run: these functions return where it is on the curve itself, from
# the threshold, the curve's values and all curves.
RELATIONS: Mapping[str, Callable[[float, Sequence[float], Columns], float]] = {
    "": lambda threshold, values, curves: threshold,
    "last / first": lambda threshold, values, curves: threshold * first(values),
    "last / median": lambda threshold, values, curves: threshold * median(values),
    "rise": lambda threshold, values, curves: threshold + first(values),
    "rise in standard deviations": lambda threshold, values, curves: (
        threshold * first(curves["reward_std"]) + first(values)
    ),
}


def pictures(rounds: Sequence[tuple[RoundResults, Params]]) -> list[Chart]:
    """A chart for each entry of PANELS that was measured, with the curves of all rounds."""
    names, drawn = [results.name for results, _ in rounds], []
    for title, columns, unit in PANELS:
        curves = [
            Curve(results.name, series, *points, dots=series == VALIDATION)
            for results, _ in rounds
            for series, column in columns.items()
            if (points := measured(results.curves, column))
        ]
        if not curves:
            continue
        with_curve = {curve.round for curve in curves}
        bounds = [
            one
            for results, params in rounds
            if results.name in with_curve
            for one in round_bounds(results, columns.values(), params.ppo)
        ]
        marks = [
            mark for results, _ in rounds for mark in round_marks(results, columns.values(), unit)
        ]
        dots = "Dots: validation prompts." if VALIDATION in columns else ""
        note = " ".join(filter(None, (dots, health_note(bounds))))
        drawn.append(line_charts.lines(title, curves, names, ("update", unit), note, bounds, marks))
    return drawn


def round_bounds(results: RoundResults, columns: Collection[str], params: PpoParams) -> list[Bound]:
    """Thresholds of the health checks of these columns."""
    return [
        Bound(results.name, bound_text(check), value)
        for check in HEALTH_CHECKS
        if check.column in columns and (value := bound(check, results.curves, params)) is not None
    ]


def bound_text(check: HealthCheck) -> str:
    """The check with the key of its threshold, if it has one."""
    match = NUMBER_OR_KEY.search(check.threshold)
    return f"{check.name} ({match[0]}):" if match and match[1] else f"{check.name}:"


def health_note(bounds: Collection[Bound]) -> str:
    """What is healthy, for those of the bounds that are relative to the start."""
    return " ".join(
        f"{check.name}: healthy is {relation} {check.threshold}."
        for check in HEALTH_CHECKS
        for relation in [check.metric.partition(", ")[2]]
        if relation and bound_text(check) in {bound.text for bound in bounds}
    )


def round_marks(results: RoundResults, columns: Collection[str], unit: str) -> list[Mark]:
    """The selected policy on the first of these columns that has its update, and findings."""
    values = {
        column: dict(zip(*(measured(results.curves, column) or ((), ())), strict=True))
        for column in columns
    }
    selected = results.metrics["ppo"].get("policy_update")
    marks = [
        Mark(
            results.name,
            SELECTED,
            selected,
            by_update[selected],
            {"selected policy": f"update {selected}", "value": f"{by_update[selected]:.4g} {unit}"},
        )
        for by_update in values.values()
        if selected is not None and selected in by_update
    ][:1]
    for finding in results.findings:
        column = finding["metric"].split()[0].rstrip(",")
        if (value := values.get(column, {}).get(finding["update"])) is not None:
            texts = {
                "finding": f"{finding['verdict']}: {finding['sign']}, update {finding['update']}",
                "value": f"{finding['metric']} {finding['value']:.3g}",
                "healthy": finding["threshold"],
                "cause": finding["cause"],
                "first": finding["first_fix"],
            }
            marks.append(Mark(results.name, FINDING, finding["update"], value, texts))
    return marks


def bound(check: HealthCheck, curves: Columns, params: PpoParams) -> float | None:
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
    match = NUMBER_OR_KEY.search(threshold)
    assert match, threshold
    return float(getattr(params, match[1]) if match[1] else match[0])


def first(values: Sequence[float]) -> float:
    return fmean(values[:WINDOW])


def measured(curves: Columns, column: str) -> tuple[list[float], list[float]] | None:
    """Updates and values of a column, without those that were not measured or are infinite."""
    points = [
        (update, value)
        for update, value in zip(curves.get("step", ()), curves.get(column, ()), strict=False)
        if math.isfinite(value)
    ]
    return ([update for update, _ in points], [value for _, value in points]) if points else None
