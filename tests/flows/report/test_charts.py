"""Charts as Vega-Lite specifications, and as SVG without a page."""

import json
import re
from typing import Any

import pytest

from flows.report import charts, line_charts
from flows.report.bar_charts import Bar, bars
from flows.report.charts import Chart
from flows.report.line_charts import FINDING, SELECTED, Bound, Curve, Mark, lines, thinned

AXES = ("update", "nats")
EVIL = "</script><script>alert(\"x\")</script> 'quoted' <b>"


def one_curve(*ys: float, round_: str = "r0") -> Curve:
    return Curve(round_, "training", list(range(1, len(ys) + 1)), ys)


def visible(svg: str) -> list[str]:
    """The texts in a picture."""
    return re.findall(r">([^<>]+)</(?:text|tspan)>", svg)


def layers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers that draw something, with those of groups."""
    inner = [drawn for layer in spec.get("layer", []) for drawn in layers(layer)]
    return inner if "layer" in spec else [spec]


def test_16_rounds_are_drawn_differently_and_the_first_four_in_all_respects() -> None:
    looks = [charts.look(number) for number in range(16)]
    assert len({(look.colour, look.dash) for look in looks}) == 16
    assert len({look.colour for look in looks[:4]}) == len({look.dash for look in looks[:4]}) == 4
    assert len({look.shape for look in looks[:4]}) == 4


def test_a_long_curve_keeps_its_ends_and_peaks() -> None:
    xs, ys = list(range(10_000)), [0.0] * 10_000
    ys[4321], ys[8765], ys[-1] = 9.0, -9.0, 0.5
    kept_x, kept_y = thinned(xs, ys)
    assert len(kept_x) <= line_charts.MOST_POINTS and kept_x == sorted(kept_x)
    assert (kept_x[0], kept_x[-1], kept_y[-1]) == (0, 9999, 0.5)
    assert {(4321, 9.0), (8765, -9.0)} <= {*zip(kept_x, kept_y, strict=True)}
    short = thinned([1, 2, 3], [0.123456, 2.0, 3.0])
    assert short == ([1, 2, 3], [0.1235, 2, 3])


def test_updates_are_not_rounded() -> None:
    [row] = lines("A", [Curve("r0", "training", [12345, 12346], [1, 2])], ["r0"], AXES).spec[
        "data"
    ]["values"]
    assert row["x"] == [12345, 12346]


def test_a_bound_far_from_its_curve_is_only_in_the_note() -> None:
    """The curve is from 0 to 2, so 4 is as far from it as it is high."""
    for value, drawn in ((4.0, True), (-2.0, True), (4.1, False), (1000.0, False)):
        bound = Bound("r0", "budget (ppo.kl):", value)
        chart = lines("A", [one_curve(0.0, 1.0, 2.0)], ["r0"], AXES, bounds=[bound])
        label = f"budget (ppo.kl): {value:.4g}"
        assert (label in visible(charts.svg(chart))) is drawn
        assert chart.note == ("" if drawn else f"Outside the chart: {label}.")


def test_of_thresholds_that_differ_by_round_the_newest_has_the_label() -> None:
    curves = [one_curve(1.0, 2.0), one_curve(1.0, 2.0, round_="r1")]
    bounds = [Bound("r0", "low:", 1.5), Bound("r1", "low:", 1.6)]
    svg = charts.svg(lines("A", curves, ["r0", "r1"], AXES, bounds=bounds))
    assert "low: 1.6" in visible(svg) and "low: 1.5" not in visible(svg)
    far = lines(
        "A",
        curves,
        ["r0", "r1"],
        AXES,
        bounds=[Bound(r, "top:", v) for r, v in (("r0", 9), ("r1", 10))],
    )
    assert far.note == "Outside the chart: top: 9 to 10."


def test_few_updates_have_integer_ticks_and_one_update_is_seen() -> None:
    chart = lines("A", [Curve("r0", "training", [3], [0.5])], ["r0"], AXES)
    assert visible(charts.svg(chart))[:5] == ["0", "1", "2", "3", "update"]
    two = lines("A", [one_curve(0.5, 0.6)], ["r0"], AXES)
    assert visible(charts.svg(two))[:4] == ["0", "1", "2", "update"]
    assert chart.spec["data"]["values"][0]["dots"]


def test_the_newest_rounds_are_drawn_first() -> None:
    names = [f"r{number}" for number in range(6)]
    chart = lines("A", [one_curve(1.0, 2.0, round_=name) for name in names], names, AXES)
    assert chart.spec["params"] == [{"name": "shown", "value": ["r2", "r3", "r4", "r5"]}]
    drawn = set(re.findall(r'stroke="(#\w{6})" stroke-width="1.8"', charts.svg(chart)))
    assert len(drawn) == 4


def test_marks_have_their_texts_and_a_shape_of_their_own() -> None:
    marks = [
        Mark("r0", SELECTED, 2, 2.0, {"selected policy": "update 2"}),
        Mark("r0", FINDING, 1, 1.0, {"finding": EVIL}),
    ]
    spec = lines("A", [one_curve(1.0, 2.0)], ["r0"], AXES, marks=marks).spec
    drawn = {layer["mark"].get("shape"): layer for layer in layers(spec)}
    assert drawn["circle"]["data"]["values"][0]["selected policy"] == "update 2"
    assert drawn["cross"]["encoding"]["tooltip"] == [{"field": "round"}, {"field": "finding"}]
    assert drawn["cross"]["encoding"]["color"] == {"value": charts.BAD}


def bar(**changes: Any) -> Bar:
    values = {"round": "r0", "name": "empty", "share": 0.1, "low": 0.05, "high": 0.2, "n": 91}
    return Bar(**(values | {"threshold": 0.25, "verdict": "✓"} | changes))


def test_a_failed_bar_differs_in_colour_and_text() -> None:
    failed = bar(name="typo", share=0.4, high=0.5, verdict="✗ fails")
    svg = charts.svg(bars("A", [bar(), failed], ["r0"], "share of pairs", "gates.reward.probe"))
    assert {"0.10, n 91 ✓", "0.40, n 91 ✗ fails", "share of pairs"} <= set(visible(svg))
    assert "threshold 0.25 (gates.reward.probe)" in " ".join(visible(svg))
    good, bad = (charts.PAPER[name] for name in ("--c1", "--bad"))
    assert re.findall(r'<path [^>]*fill="(#\w{6})"', svg) == [good, bad, *["#1b1f24"] * 2]


def test_bars_of_a_name_are_together_and_name_their_round() -> None:
    rates = [bar(), bar(name="typo"), bar(round="r1"), bar(round="r1", name="typo")]
    svg = charts.svg(bars("A", rates, ["r0", "r1"], "share", "key"))
    assert visible(svg).count("empty") == visible(svg).count("typo") == 1
    rows = bars("A", rates, ["r0", "r1"], "share", "key").spec["encoding"]["y"]["sort"]
    assert rows == ["empty r0", "empty r1", "typo r0", "typo r1"]
    assert "r1: 0.10, n 91 ✓" in visible(svg)


@pytest.mark.parametrize(
    "chart",
    [
        lines(
            "Reward & judge, " + "a long title " * 9, [one_curve(1.0, 2.0)], ["r0"], AXES, note=EVIL
        ),
        bars(EVIL, [bar(name=EVIL)], ["r0"], "share", "key"),
    ],
)
def test_a_picture_needs_no_style_or_script_of_a_page(chart: Chart) -> None:
    svg = charts.svg(chart)
    assert svg.startswith("<svg ") and "var(--" not in svg and charts.PAPER["--c1"] in svg
    assert "<script" not in svg
    title = " ".join(chart.title.split())
    shown = " ".join(visible(svg)).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    assert title in shown


def test_a_description_names_rounds_and_values() -> None:
    chart = lines("KL", [one_curve(0.0, 1.25)], ["r0"], AXES)
    assert chart.description == "KL, first to last. r0, training: 0 to 1.25"
    assert json.dumps(chart.spec)  # the page contains it
