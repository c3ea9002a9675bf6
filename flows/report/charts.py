"""Pictures of the report: matplotlib's SVG, whose colours the page's style sets, for light, dark
and paper.
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

Points = tuple[Sequence[float], Sequence[float]]  # x, y
Rate = tuple[float, float, float]  # share, and its interval

# matplotlib knows no CSS variables: these colours stand for them until the text is there
INK, LINE, BAD = "#010101", "#020202", "#030303"
SERIES = ("#0300f1", "#0300f2", "#0300f3", "#0300f4")
VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    BAD: "var(--bad)",
    **{colour: f"var(--c{n})" for n, colour in enumerate(SERIES, 1)},
}
PAPER = {
    "--ink": "#1b1f24", "--line": "#d5dae0", "--bad": "#b3261e", "--c1": "#2a6fb0", "--c2": "#c25e00", "--c3": "#4d8b31", "--c4": "#8a4fa3",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
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
    "text.parse_math": False,  # a model may write $
}
BOUNDS = (":", "-.")
FAR = 2.0  # heights of the curves


@dataclass(frozen=True)
class Marks:
    """By what the legend calls them: heights as dotted lines, moments as dashed upright ones, spots
    (x, y) as crosses.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    moments: Mapping[str, float] = field(default_factory=dict)
    spots: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds) + len(self.moments) + len(self.spots)


NO_MARKS = Marks()


def lines(
    title: str,
    series: Mapping[str, Points],
    x: str,
    y: str,
    marks: Marks = NO_MARKS,
    dots: bool = False,
) -> Markup:
    named = len(series) + len(marks) if len(series) > 1 or marks else 0

    def draw(axes: Axes) -> None:
        for (label, (xs, ys)), colour in zip(series.items(), SERIES, strict=False):
            axes.plot(
                xs,
                ys,
                "o-" if dots else "-",
                color=colour,
                label=label,
                markersize=4,
                linewidth=1.6,
            )
        low, high = axes.get_ylim()
        for (label, bound), dashes in zip(marks.bounds.items(), cycle(BOUNDS)):
            near = (
                low - FAR * (high - low) <= bound <= high + FAR * (high - low)
            )  # else the legend says it, and the curve keeps its shape
            axes.plot([], [], color=INK, linestyle=dashes, linewidth=1, label=label)
            if near:
                axes.axhline(bound, color=INK, linestyle=dashes, linewidth=1)
        for label, moment in marks.moments.items():
            axes.axvline(moment, color=INK, linestyle="--", linewidth=1, label=label)
        for label, (at_x, at_y) in marks.spots.items():
            axes.plot([at_x], [at_y], "X", color=BAD, markersize=8, markeredgewidth=0, label=label)
        axes.set(xlabel=x, ylabel=y)
        axes.locator_params(
            axis="x", integer=all(float(at).is_integer() for xs, _ in series.values() for at in xs)
        )
        if named:
            axes.figure.legend(fontsize=8, loc="outside lower left")

    return _svg(title, (4.6, 2.7 + 0.17 * named), draw)


def bars(title: str, rates: Mapping[str, Rate], bounds: Mapping[str, float]) -> Markup:
    """Shares with their intervals, one below the other."""

    def draw(axes: Axes) -> None:
        names = list(rates)[::-1]
        values = [rates[name] for name in names]
        spread = [
            [rate - low for rate, low, _ in values],
            [high - rate for rate, _, high in values],
        ]
        axes.barh(names, [rate for rate, _, _ in values], color=SERIES[0], height=0.6)
        axes.errorbar(
            [rate for rate, _, _ in values],
            range(len(names)),
            xerr=spread,
            fmt="none",
            ecolor=INK,
            elinewidth=1,
        )
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
    """The picture for where there is no page with a style of its own: dark on white."""
    text = str(picture)  # Markup would escape what is put in
    for variable, colour in PAPER.items():
        text = text.replace(f"var({variable})", colour)
    return text.replace("<svg ", '<svg style="background: #fff" ', 1)


def _svg(title: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> Markup:
    with rc_context(
        {**STYLE, "svg.hashsalt": title}
    ):  # ids that are this picture's own, and the same in every run
        figure = Figure(size, layout="constrained")
        axes = figure.subplots()
        axes.grid(alpha=0.5, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", pad=14)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    named = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(
        r' id="([^"]+)"', lambda found: found[0] if found[1] in named else "", text
    )  # axes_1 is in every picture
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))
