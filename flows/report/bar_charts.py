"""Charts of shares as bars: those of a name in all rounds together, with their threshold."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from flows.report.charts import (
    BAD,
    GRID,
    INK,
    IS_SHOWN,
    Chart,
    Spec,
    in_rounds,
    look,
    number,
    rounded,
)

LABEL_CHARACTERS = 24  # of a line of a name
BAR_STEP, LINE_HEIGHT = 22, 13  # of a bar, and of a line of its name
UP = f"{-LINE_HEIGHT / 2} * (length(datum.lines) - 1)"  # so that a name is beside its bar
BAR_TEXTS = {
    "round": "round",
    "label": "of",
    "share": "share",
    "interval": "95% interval",
    "n": "n",
    "threshold": "threshold",
    "verdict": "verdict",
}


@dataclass(frozen=True)
class Bar:
    """A share of `n` with its 95% interval. verdict: with a sign, ✓ or ✗, or empty if no threshold
    applies.
    """

    round: str
    name: str
    share: float
    low: float
    high: float
    n: int
    threshold: float
    verdict: str

    @property
    def failed(self) -> bool:
        return self.verdict.startswith("✗")


def bars(title: str, rates: Sequence[Bar], rounds: Sequence[str], axis: str, key: str) -> Chart:
    """Horizontal bars with their intervals and threshold, those of a name together.

    Args:
        rounds: all rounds of the report.
        axis: what a share is.
        key: of the threshold in params.yaml.
    """
    several = len({bar.round for bar in rates}) > 1
    threshold = rates[-1].threshold
    label = [f"threshold {threshold:g}", f"({key})"]
    highest = min(1.0, max(max(bar.high, 1.15 * bar.threshold) for bar in rates))
    names = list(dict.fromkeys(bar.name for bar in rates))
    rows = [_bar_row(bar, several) for bar in sorted(rates, key=lambda bar: names.index(bar.name))]
    lines_of_name = max(row["name"].count("\n") + 1 for row in rows)
    spec = in_rounds(rounds) | {
        "height": {"step": max(BAR_STEP, LINE_HEIGHT * lines_of_name + 4)},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": rows},
        "transform": [
            {"filter": IS_SHOWN},
            {"window": [{"op": "row_number", "as": "number"}], "groupby": ["name"]},
        ],
        "encoding": {
            "y": {"field": "row", "sort": [row["row"] for row in rows], "axis": None},
            "tooltip": [{"field": name, "title": title} for name, title in BAR_TEXTS.items()],
        },
        "layer": _bar_layers(axis, highest, label),
    }
    texts = (f"{bar.round}, {bar.name}: {bar.share:.2g} {bar.verdict}" for bar in rates)
    return Chart(title, "", f"{title}: {'; '.join(texts)}; {' '.join(label)}", spec)


def _bar_row(bar: Bar, several: bool) -> Spec:
    text = f"{bar.share:.2f}, n {bar.n} {bar.verdict}".strip()
    return {
        "round": bar.round,
        "row": f"{bar.name} {bar.round}",
        "name": textwrap.fill(bar.name, LABEL_CHARACTERS),
        "label": bar.name,
        "share": rounded(bar.share),
        "low": rounded(bar.low),
        "high": rounded(bar.high),
        "interval": f"{bar.low:.3f} to {bar.high:.3f}",
        "n": bar.n,
        "threshold": bar.threshold,
        "failed": bar.failed,
        "verdict": bar.verdict,
        "text": f"{bar.round}: {text}" if several else text,
    }


def _bar_layers(axis: str, highest: float, threshold_label: Sequence[str]) -> list[Spec]:
    """Names, bars, intervals, thresholds, and the numbers beside them."""
    colour = {"condition": {"test": "datum.failed", "value": BAD}, "value": INK}
    scale = {"domain": [0, highest], "nice": False}
    x_axis = {"title": axis, "scale": scale, "axis": {"tickCount": 4, "format": ".2~f"}}
    text = {"type": "text", "baseline": "middle"}
    start, end = {"value": 0}, {"value": {"expr": "width"}}
    first_of_name = [{"filter": "datum.number === 1"}]
    return [
        {
            "transform": first_of_name,
            "mark": {"type": "rule", "color": GRID},
            "encoding": {
                "x": start,
                "x2": end,
                "y": {"field": "row", "bandPosition": 0},
            },
        },
        {
            "transform": [*first_of_name, {"calculate": "split(datum.name, '\\n')", "as": "lines"}],
            "mark": text
            | {"align": "right", "dx": -8, "dy": {"expr": UP}, "lineHeight": LINE_HEIGHT},
            "encoding": {"x": start, "text": {"field": "lines"}},
        },
        {
            "mark": {"type": "bar", "height": 12},
            "encoding": {
                "x": number("share") | x_axis,
                "color": colour | {"value": look(0).colour},
            },
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {"x": number("low"), "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "tick", "thickness": 1.5, "size": BAR_STEP, "color": INK},
            "encoding": {"x": number("threshold")},
        },
        {
            "mark": text | {"align": "left", "dx": 8},
            "encoding": {"x": end, "text": {"field": "text"}, "color": colour},
        },
        {
            "data": {"values": [{"text": threshold_label}]},
            "mark": text | {"align": "left", "lineHeight": LINE_HEIGHT},
            "encoding": {
                "x": start,
                "y": {"value": -LINE_HEIGHT - 8},
                "text": {"field": "text"},
                "tooltip": {"value": None},
            },
        },
    ]
