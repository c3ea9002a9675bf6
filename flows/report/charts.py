"""Charts of the report: SVG by matplotlib.

The colours are CSS variables of the page, so that one picture fits light, dark and printed pages.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
Rate = tuple[float, float, float]  # share, low and high end of its interval
Interval = tuple[Sequence[float], Sequence[float]]  # low and high ends
NO_INTERVALS: Mapping[str, Interval] = {}

# matplotlib does not know CSS variables: it draws with these unused colours, and _svg replaces each
# by its variable
INK, LINE, BAD = "#010101", "#020202", "#030303"
SERIES = ("#0300f1", "#0300f2", "#0300f3", "#0300f4")
VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    BAD: "var(--bad)",
    **{colour: f"var(--c{n})" for n, colour in enumerate(SERIES, 1)},
}
PAPER = {
    "--ink": "#1b1f24",
    "--line": "#d5dae0",
    "--bad": "#b3261e",
    "--c1": "#2a6fb0",
    "--c2": "#c25e00",
    "--c3": "#4d8b31",
    "--c4": "#8a4fa3",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],  # each text repeats the list
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "legend.frameon": False,
    "text.parse_math": False,  # labels contain texts of models, and those may contain $
}
BOUND_STYLES = (":", "-.")
MAX_BOUND_DISTANCE = 2.0  # from the curves, in heights of the curves


@dataclass(frozen=True)
class Marks:
    """What a line chart shows beside its curves, by the label in the legend.

    bounds: y of a dotted horizontal line. updates: x of a dashed vertical line. points: (x, y) of a
    cross.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    updates: Mapping[str, float] = field(default_factory=dict)
    points: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds) + len(self.updates) + len(self.points)


NO_MARKS = Marks()


def lines(
    title: str,
    series: Mapping[str, Curve],
    x_label: str,
    y_label: str,
    marks: Marks = NO_MARKS,
    dots: bool = False,
    intervals: Mapping[str, Interval] = NO_INTERVALS,
) -> Markup:
    """Curves by their label, with marks; `dots` marks each measurement.

    intervals: low and high ends for the values of some curves, by label.
    """
    legend_entries = len(series) + len(marks) if len(series) > 1 or marks else 0

    def draw(axes: Axes) -> None:
        curve_style: dict[str, Any] = {"markersize": 4, "linewidth": 1.6}
        for (label, (xs, ys)), colour in zip(series.items(), SERIES, strict=False):
            axes.plot(xs, ys, "o-" if dots else "-", color=colour, label=label, **curve_style)
            if label in intervals:
                axes.vlines(xs, *intervals[label], color=colour, linewidth=1)
        _draw_bounds(axes, marks.bounds)
        for label, x in marks.updates.items():
            axes.axvline(x, color=INK, linestyle="--", linewidth=1, label=label)
        for label, (x, y) in marks.points.items():
            axes.plot([x], [y], "X", color=BAD, markersize=8, markeredgewidth=0, label=label)
        axes.set(xlabel=x_label, ylabel=y_label)
        only_integers = all(float(x).is_integer() for xs, _ in series.values() for x in xs)
        axes.locator_params(axis="x", integer=only_integers)
        if legend_entries:
            axes.figure.legend(fontsize=8, loc="outside lower left")

    return _svg(title, (4.6, 2.7 + 0.17 * legend_entries), draw)


def _draw_bounds(axes: Axes, bounds: Mapping[str, float]) -> None:
    """Horizontal lines, all in the legend.

    A bound far from the curves is only in the legend: drawn, it would flatten them.
    """
    low, high = axes.get_ylim()
    margin = MAX_BOUND_DISTANCE * (high - low)
    for (label, bound), style in zip(bounds.items(), cycle(BOUND_STYLES)):
        axes.plot([], [], color=INK, linestyle=style, linewidth=1, label=label)
        if low - margin <= bound <= high + margin:
            axes.axhline(bound, color=INK, linestyle=style, linewidth=1)


def bars(title: str, rates: Mapping[str, Rate], bounds: Mapping[str, float]) -> Markup:
    """Horizontal bars of shares with their intervals, the first one on top; bounds are vertical
    lines.
    """

    def draw(axes: Axes) -> None:
        names = list(rates)[::-1]  # matplotlib starts at the bottom
        values = [rates[name] for name in names]
        shares = [share for share, _, _ in values]
        intervals = [
            [share - low for share, low, _ in values],
            [high - share for share, _, high in values],
        ]
        axes.barh(names, shares, color=SERIES[0], height=0.6)
        rows = range(len(names))
        axes.errorbar(shares, rows, xerr=intervals, fmt="none", ecolor=INK, elinewidth=1)
        for label, bound in bounds.items():
            axes.axvline(bound, color=INK, linestyle=":", linewidth=1)
            axes.annotate(
                f" {label} {bound:g}",
                (bound, 1),
                xycoords=("data", "axes fraction"),
                va="bottom",
                fontsize=8,
            )
        axes.set_xlim(0, 1)

    return _svg(title, (4.6, 0.9 + 0.28 * len(rates)), draw)


def on_paper(picture: Markup) -> str:
    """The picture with fixed colours, dark on white, for pages without the report's style."""
    svg = str(picture)  # Markup.replace would escape the new text
    for variable, colour in PAPER.items():
        svg = svg.replace(f"var({variable})", colour)
    return svg.replace("<svg ", '<svg style="background: #fff" ', 1)


def _svg(title: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> Markup:
    # The salt makes ids that differ between pictures and are the same in every run
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        axes.grid(alpha=0.5, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", pad=14)
        draw(axes)
        buffer = io.StringIO()
        no_metadata = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Ids without a reference, such as axes_1, are in every picture and would clash on one page
    referenced = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referenced else "", svg)
    svg = re.sub(r"(?<=>)\s+(?=<)", "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))
