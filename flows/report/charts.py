"""Charts of the report as Vega-Lite specifications: drawn by the report's own script, or as SVG.

The colours are CSS variables of the page, so that one chart fits light, dark and printed pages. In
all charts a round has the same colour, dash and shape.
"""

import functools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import vl_convert

from flows.core.services import HOME
from stages.lib.core.files import write_text
from stages.lib.core.reading import read_text

Spec = dict[str, Any]
PAPER = {
    "--ink": "#1b1f24",
    "--soft": "#59636e",
    "--line": "#d5dae0",
    "--bad": "#b3261e",
    "--paper": "#ffffff",
    "--c1": "#2a6fb0",
    "--c2": "#c25e00",
    "--c3": "#4d8b31",
    "--c4": "#8a4fa3",
}
DASHES = ((1, 0), (7, 3), (3, 3), (9, 3, 2, 3))
# SVG paths between -1 and 1: circle, square, triangle, diamond
SHAPES = (
    "M0,-.8A.8,.8,0,1,1,0,.8A.8,.8,0,1,1,0,-.8Z",
    "M-.75,-.75H.75V.75H-.75Z",
    "M0,-.95L.9,.7H-.9Z",
    "M0,-1L.85,0L0,1L-.85,0Z",
)
SHOWN = 4  # rounds at first: the newest ones
DIGITS = 4  # of a value
PAPER_WIDTH, PAPER_CHARACTERS = 460, 70
IS_SHOWN = "indexof(shown, datum.round) >= 0"
INK, SOFT, GRID, BAD, BACKGROUND = (
    f"var(--{name})" for name in ("ink", "soft", "line", "bad", "paper")
)
HOVER = "hover"  # the layer that only the page needs
CONFIG: Spec = {
    "aria": False,  # the page describes a chart as a whole
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11,
        "labelLimit": 0,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
    },
    "text": {"color": INK, "fontSize": 11},
    "rule": {"color": INK},
    "title": {"color": INK, "subtitleColor": SOFT, "anchor": "start", "offset": 14},
}


@dataclass(frozen=True)
class Chart:
    """A chart of all rounds.

    title, note: above it on the page. description: for people who do not see it. spec: of
    Vega-Lite, as wide as its place, without title.
    """

    title: str
    note: str
    description: str
    spec: Spec


class Look(NamedTuple):
    """How the curves of a round are drawn."""

    colour: str
    dash: tuple[int, ...]
    shape: str


def look(number: int) -> Look:
    """Of the round with this number: no other of 16 rounds has the same colour and dash."""
    other = (number + number // len(DASHES)) % len(DASHES)
    return Look(f"var(--c{number % 4 + 1})", DASHES[other], SHAPES[other])


def in_rounds(rounds: Sequence[str]) -> Spec:
    """A chart as wide as its place, whose parameter `shown` has the rounds that are drawn."""
    return {"width": "container", "params": [{"name": "shown", "value": list(rounds[-SHOWN:])}]}


def number(field: str) -> Spec:
    return {"field": field, "type": "quantitative"}


def rounded(value: float) -> float:
    """Updates and other integers stay as they are."""
    return int(value) if float(value).is_integer() else float(f"{value:.{DIGITS}g}")


def svg(chart: Chart) -> str:
    """The chart as a picture, dark on white, for pages without the report's style and script."""
    title = {
        "text": textwrap.wrap(chart.title, PAPER_CHARACTERS),
        "subtitle": textwrap.wrap(chart.note, PAPER_CHARACTERS),
    }
    spec = chart.spec | {
        "title": title,
        "width": PAPER_WIDTH,
        "padding": 10,
        "layer": _without_hover(chart.spec["layer"]),
        "description": chart.description,
    }
    text = json.dumps({"spec": spec, "config": CONFIG | {"background": BACKGROUND}})
    for variable, colour in PAPER.items():
        text = text.replace(f"var({variable})", colour)
    drawing = json.loads(text)
    picture: str = vl_convert.vegalite_to_svg(drawing["spec"], config=drawing["config"])
    return picture


def _without_hover(layers: Sequence[Spec]) -> list[Spec]:
    return [
        layer | ({"layer": _without_hover(layer["layer"])} if "layer" in layer else {})
        for layer in layers
        if layer.get("name") != HOVER
    ]


@functools.cache
def library() -> str:
    """JavaScript of Vega, Vega-Lite and vega-embed, which needs no network.

    Bundling takes seconds, so a file keeps the result.
    """
    path = HOME / f"vega-embed-{version('vl-convert-python')}.js"
    if not path.exists():
        write_text(path, vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return read_text(path, fix=f"remove {path}")
