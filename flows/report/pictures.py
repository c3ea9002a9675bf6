"""The charts of a stage, of all rounds of the report together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.report import policy_curves
from flows.report.bar_charts import Bar, bars
from flows.report.charts import Chart
from flows.report.line_charts import SELECTED, Curve, Mark, lines
from flows.report.round_data import RoundResults
from stages.lib.core.params import Params

Rounds = Sequence[tuple[RoundResults, Params]]  # with each round's own settings
Rows = Mapping[str, Mapping[str, Any]]  # of metrics, by what was measured
SLICE_PAIRS = 30  # as in stages/battery/metrics.py: the gate reads no smaller slice
POLICY = "policy"
# title, metric of evaluate/metrics.json, y axis
EVALUATION = (
    ("Judge score over KL", "judge_score", "judge score"),
    ("Reward model's score over KL", "score", "standard deviations"),
    ("Variety across prompts over KL", "distinct_2", "distinct-2 (share)"),
)


def battery(rounds: Rounds) -> list[Chart]:
    """Rates of the reward model's test battery, with the thresholds of its gate."""
    by_title = {
        "Corrupted text scores above the original": ("probe", "share of texts", _probes),
        "Edit that keeps the meaning reverses a correct pair": ("flip", "share of pairs", _flips),
        "Appended ending reverses a correct pair against the judge": (
            "ending",
            "share of pairs",
            lambda metrics: _endings(metrics, "endings"),
        ),
        "Mined ending reverses a correct pair against the judge": (
            "mined",
            "share of pairs",
            lambda metrics: _endings(metrics, "mined"),
        ),
        "Accuracy by kind of pair": ("worst_slice", "share of pairs ranked right", _slices),
    }
    names = [results.name for results, _ in rounds]
    drawn = []
    for title, (key, axis, rows_of) in by_title.items():
        rates = [
            bar
            for results, params in rounds
            if "endings" in results.metrics["battery"]  # reached, and something was measured
            for bar in _bars(
                results.name,
                rows_of(results.metrics["battery"]),
                getattr(params.gates.reward, key),
                key == "worst_slice",
            )
        ]
        if rates:
            drawn.append(bars(title, rates, names, axis, f"gates.reward.{key}"))
    return drawn


def _probes(metrics: Mapping[str, Any]) -> Rows:
    """Without the one that has no threshold."""
    return {
        name.replace("_", " "): row
        for name, row in metrics["probes"].items()
        if name != "prompt_swapped"
    }


def _flips(metrics: Mapping[str, Any]) -> Rows:
    return {name.replace("_", " "): row for name, row in metrics["flips"].items()}


def _endings(metrics: Mapping[str, Any], kind: str) -> Rows:
    """As the gate counts them: against the judge."""
    return {
        repr(text): {
            "rate": row["against_judge"],
            "low": row["against_judge_low"],
            "high": row["against_judge_high"],
            "pairs": row.get("pairs"),
        }
        for row, text in zip(metrics[kind].values(), metrics[f"{kind}_text"], strict=True)
    }


def _slices(metrics: Mapping[str, Any]) -> Rows:
    return {
        f"{group}: {name}".replace("_", " "): row | {"rate": row["accuracy"]}
        for group, rows in metrics["accuracy"].items()
        for name, row in rows.items()
    }


def _bars(round_: str, rows: Rows, threshold: float, is_accuracy: bool) -> list[Bar]:
    """Of the rates that were measured: of no texts there is none."""
    return [
        Bar(
            round=round_,
            name=name,
            share=row["rate"],
            low=row["low"],
            high=row["high"],
            n=row.get("pairs", row.get("texts")),
            threshold=threshold,
            verdict=_verdict(row, threshold, is_accuracy),
        )
        for name, row in rows.items()
        if None not in (row["rate"], row["low"], row["high"])
    ]


def _verdict(row: Mapping[str, Any], threshold: float, is_accuracy: bool) -> str:
    if is_accuracy and row["pairs"] < SLICE_PAIRS:
        return ""
    failed = row["rate"] < threshold if is_accuracy else row["rate"] > threshold
    return "✗ fails" if failed else "✓"


def evaluation(rounds: Rounds) -> list[Chart]:
    """Judge score with its 95% interval, reward score and distinct-2 of SFT, checkpoints and
    policy, over KL from SFT: a chart each, with the same x.
    """
    names, drawn = [results.name for results, _ in rounds], []
    measured = {results.name: models(results.metrics["evaluate"]) for results, _ in rounds}
    for title, metric, y in EVALUATION:
        curves = [
            curve for name, rows in measured.items() if (curve := _over_kl(name, rows, metric))
        ]
        if curves:
            marks = [mark for curve in curves for mark in _policy_marks(curve, y)]
            axes = ("KL from SFT, nats per sequence", y)
            drawn.append(lines(title, curves, names, axes, marks=marks))
    return drawn


def models(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """SFT, checkpoints and policy by their name, in the order of their KL. A checkpoint with the
    policy's weights is the policy.
    """
    policy = metrics.get("ppo", {})
    by_name = {"SFT": metrics.get("sft", {}), POLICY: policy}
    for name, row in metrics.get("checkpoints", {}).items():
        if any(row.get(metric) != policy.get(metric) for metric in ("kl", "judge_score", "score")):
            by_name[f"update {int(name.removeprefix('step_'))}"] = row
    return {
        name: by_name[name]
        for name in sorted(by_name, key=lambda name: by_name[name].get("kl") or 0.0)
        if by_name[name].get("kl") is not None
    }


def _over_kl(round_: str, rows: Rows, metric: str) -> Curve | None:
    rows = {name: row for name, row in rows.items() if row.get(metric) is not None}
    if not rows:
        return None
    values = [*rows.values()]
    ends = [f"{metric}_low", f"{metric}_high"]
    has_interval = all(row.get(end) is not None for row in values for end in ends)
    low, high = ([row[end] for row in values] if has_interval else [] for end in ends)
    kl, ys = ([row[name] for row in values] for name in ("kl", metric))
    return Curve(round_, "SFT to policy", kl, ys, [*rows], low, high, dots=True)


def _policy_marks(curve: Curve, y_title: str) -> list[Mark]:
    return [
        Mark(curve.round, SELECTED, x, y, {"model": POLICY, "value": f"{y:.4g} {y_title}"})
        for x, y, name in zip(curve.xs, curve.ys, curve.names, strict=True)
        if name == POLICY
    ]


# By stage
PICTURES: Mapping[str, Callable[[Rounds], list[Chart]]] = {
    "battery": battery,
    "ppo": policy_curves.pictures,
    "evaluate": evaluation,
}
