"""Charts of curves: those of all rounds in one chart, with thresholds and marks."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.report.charts import (
    BACKGROUND,
    BAD,
    HOVER,
    INK,
    IS_SHOWN,
    Chart,
    Spec,
    in_rounds,
    look,
    number,
    rounded,
)

MOST_POINTS = 160  # of a curve
MAX_BOUND_DISTANCE = 1.0  # from the curves, in heights of the curves
HEIGHT, TICKS = 190, 6
NEAREST: Spec = {
    "name": "nearest",
    "select": {
        "type": "point",
        "fields": ["round", "series", "x"],
        "nearest": True,
        "on": "pointerover",
        "clear": "pointerout",
    },
}
# Without a key, the wheel scrolls the page
ZOOM: Spec = {
    "name": "zoom",
    "bind": "scales",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"},
}
POINT: Spec = {"type": "point", "clip": True}
SELECTED, FINDING = "selected", "finding"
SYMBOLS: Mapping[str, Spec] = {
    SELECTED: {"shape": "circle", "filled": False, "size": 220, "strokeWidth": 2},
    FINDING: {"shape": "cross", "angle": 45, "filled": True, "size": 150},
}
LOOK = {"color": "colour", "strokeDash": "dash", "shape": "shape"}  # fields by channel


@dataclass(frozen=True)
class Curve:
    """One series of a round. names: of its points, e.g. of models. low, high: 95% intervals.

    dots: each point has the round's shape.
    """

    round: str
    series: str
    xs: Sequence[float]
    ys: Sequence[float]
    names: Sequence[str] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False


@dataclass(frozen=True)
class Bound:
    """A threshold of a round on its curve. text: what it is."""

    round: str
    text: str
    value: float


@dataclass(frozen=True)
class Mark:
    """A point of a round with a symbol of its own: a `finding` or the `selected` policy.

    texts: what is shown of it, by name.
    """

    round: str
    kind: str
    x: float
    y: float
    texts: Mapping[str, str]


def lines(
    title: str,
    curves: Sequence[Curve],
    rounds: Sequence[str],
    axes: tuple[str, str],
    note: str = "",
    bounds: Sequence[Bound] = (),
    marks: Sequence[Mark] = (),
) -> Chart:
    """Curves over a common x, with their thresholds and marks.

    Args:
        rounds: all rounds of the report, also those without a curve here.
        axes: titles of x and y.
    """
    drawn = [bound for bound in bounds if is_near(bound, curves)]
    spec = in_rounds(rounds) | {
        "height": HEIGHT,
        "data": {"values": [_curve_row(curve) for curve in curves]},
        "transform": [{"filter": IS_SHOWN}, {"flatten": list(_curve_row(curves[0]))[3:]}],
        "encoding": _y_axis(axes[1]) | _by_round("color", rounds),
        "layer": [
            *_bound_layers(drawn),
            {"encoding": _x_axis(curves, axes[0]), "layer": _curve_layers(curves, rounds, axes)},
            *(
                _mark_layer(kind, marks)
                for kind in SYMBOLS
                if kind in {mark.kind for mark in marks}
            ),
        ],
    }
    far = [bound for bound in bounds if bound not in drawn]
    notes = [note, _far_away(far), _thinned_note(curves)]
    return Chart(title, " ".join(filter(None, notes)), _spoken(title, curves), spec)


def is_near(bound: Bound, curves: Sequence[Curve]) -> bool:
    """A threshold far from the round's curves is not drawn: it would flatten them."""
    ys = [y for curve in curves if curve.round == bound.round for y in curve.ys]
    low, high = min(ys), max(ys)
    margin = MAX_BOUND_DISTANCE * ((high - low) or abs(high))
    return low - margin <= bound.value <= high + margin


def thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS points of a curve: the first, the last, and of each part the lowest and
    the highest, so that no peak is lost.
    """
    points = list(zip(xs, ys, strict=True))
    if len(points) > MOST_POINTS:
        inner, parts = points[1:-1], MOST_POINTS // 2 - 1
        edges = [len(inner) * part // parts for part in range(parts + 1)]
        chosen = {points[0], points[-1]}
        for start, end in itertools.pairwise(edges):
            part = inner[start:end]
            chosen |= {choose(part, key=lambda point: point[1]) for choose in (min, max)}
        points = sorted(chosen)
    return [x for x, _ in points], [rounded(y) for _, y in points]


def _has_dots(curve: Curve) -> bool:
    """A line through one point would not be seen."""
    return curve.dots or len(curve.xs) == 1


def _curve_row(curve: Curve) -> Spec:
    row: Spec = {"round": curve.round, "series": curve.series, "dots": _has_dots(curve)}
    xs, ys = (curve.xs, [*map(rounded, curve.ys)]) if curve.names else thinned(curve.xs, curve.ys)
    row |= {"x": [*map(rounded, xs)], "y": ys}
    if curve.names:
        row["name"] = list(curve.names)
    if curve.low:
        row |= {"low": [*map(rounded, curve.low)], "high": [*map(rounded, curve.high)]}
    return row


def _x_axis(curves: Sequence[Curve], title: str) -> Spec:
    """It begins at 0. Updates have no ticks between them."""
    xs = [x for curve in curves for x in curve.xs]
    ticks: Spec = {"tickCount": TICKS}
    if all(float(x).is_integer() for x in xs):
        few = {"values": list(range(int(max(xs)) + 1))} if max(xs) <= TICKS else {}
        ticks |= {"tickMinStep": 1, "format": "d"} | few
    scale = {"domain": [0, max(xs) or 1], "nice": False, "padding": 10}
    axis = {"grid": False, "labelOverlap": True} | ticks
    return {"x": number("x") | {"title": title, "scale": scale, "axis": axis}}


def _y_axis(title: str) -> Spec:
    scale = {"zero": False, "nice": False, "padding": 12}
    return {"y": number("y") | {"title": title, "scale": scale, "axis": {"tickCount": 5}}}


def _by_round(channel: str, rounds: Sequence[str]) -> Spec:
    """A channel (of LOOK) by which the rounds differ."""
    values = [getattr(look(number), LOOK[channel]) for number in range(len(rounds))]
    scale = {"domain": list(rounds), "range": values}
    return {channel: {"field": "round", "type": "nominal", "legend": None, "scale": scale}}


def _curve_layers(
    curves: Sequence[Curve], rounds: Sequence[str], axes: tuple[str, str]
) -> list[Spec]:
    """Curves, intervals, and points that react to the pointer near them."""
    width = {"condition": {"test": "datum.dots", "value": 1.2}, "value": 1.8}
    line_encoding = {"detail": {"field": "series"}, "strokeWidth": width}
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "clip": True},
            "encoding": line_encoding | _by_round("strokeDash", rounds),
        }
    ]
    if any(_has_dots(curve) for curve in curves):
        layers.append(
            {
                "transform": [{"filter": "datum.dots"}],
                "mark": POINT | {"filled": True, "size": 50, "opacity": 1},
                "encoding": _by_round("shape", rounds),
            }
        )
    texts = {"round": "round"} | ({"name": "model"} if curves[0].names else {"series": "of"})
    texts |= {"x": axes[0], "y": axes[1]}
    if curves[0].low:
        ends = {"y": number("low"), "y2": {"field": "high"}}
        layers.append({"mark": {"type": "rule", "clip": True}, "encoding": ends})
        texts |= {"low": "95% interval from", "high": "to"}
    opacity = {"condition": {"param": "nearest", "empty": False, "value": 1}, "value": 0}
    # The pointer is in the area of a point, whose datum is the point: a list of fields fails there
    values = (
        f"{json.dumps(title)}: (datum.datum || datum).{name}" for name, title in texts.items()
    )
    tooltip = {"value": {"expr": f"{{{', '.join(values)}}}"}}
    hover = {
        "name": HOVER,
        "params": [NEAREST, ZOOM],
        "mark": POINT | {"filled": True, "size": 90},
        "encoding": {"opacity": opacity, "tooltip": tooltip},
    }
    return [*layers, hover]


def _bound_layers(bounds: Sequence[Bound]) -> list[Spec]:
    """Dotted lines; of those with the same text, the newest round's has it beside the line."""
    newest = {bound.text: bound for bound in bounds}
    rows = [
        {
            "round": bound.round,
            "y": rounded(bound.value),
            "text": f"{bound.text} {bound.value:.4g}" if newest[bound.text] is bound else "",
        }
        for bound in bounds
    ]
    if not rows:
        return []
    text = {"type": "text", "align": "left", "baseline": "bottom", "clip": True}
    encoding = {"x": {"value": 4}, "text": {"field": "text"}, "color": {"value": INK}}
    layers = [
        {"mark": {"type": "rule", "strokeDash": [1, 3], "strokeWidth": 1.5, "clip": True}},
        {"mark": text | {"stroke": BACKGROUND, "strokeWidth": 4}, "encoding": encoding},
        {"mark": text, "encoding": encoding},
    ]
    return [{"data": {"values": rows}, "transform": [{"filter": IS_SHOWN}], "layer": layers}]


def _mark_layer(kind: str, marks: Sequence[Mark]) -> Spec:
    """Of marks of one kind, with their texts as tooltips."""
    rows = [
        {"round": mark.round, "x": mark.x, "y": mark.y, **mark.texts}
        for mark in marks
        if mark.kind == kind
    ]
    tooltip = [{"field": name} for name in rows[0] if name not in ("x", "y")]
    colour = {"color": {"value": BAD}} if kind == FINDING else {}
    return {
        "data": {"values": rows},
        "transform": [{"filter": IS_SHOWN}],
        "mark": POINT | {"opacity": 1} | SYMBOLS[kind],
        "encoding": {"x": number("x"), "tooltip": tooltip} | colour,
    }


def _far_away(bounds: Sequence[Bound]) -> str:
    """Which thresholds are not drawn."""
    by_text: dict[str, list[float]] = {}
    for bound in bounds:
        by_text.setdefault(bound.text, []).append(bound.value)
    ranges = {
        text: f"{min(values):.4g}" + (f" to {max(values):.4g}" if max(values) > min(values) else "")
        for text, values in by_text.items()
    }
    names = ", ".join(f"{text} {values}" for text, values in ranges.items())
    return f"Outside the chart: {names}." if names else ""


def _thinned_note(curves: Sequence[Curve]) -> str:
    if all(curve.names or len(curve.xs) <= MOST_POINTS for curve in curves):
        return ""
    return f"Lowest and highest of each {2 / MOST_POINTS:.1%} of the updates."


def _spoken(title: str, curves: Sequence[Curve]) -> str:
    ends = (
        f"{curve.round}, {curve.series}: {curve.ys[0]:.3g} to {curve.ys[-1]:.3g}"
        for curve in curves
    )
    return f"{title}, first to last. {'; '.join(ends)}"
