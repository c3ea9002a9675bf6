"""Writes docs/battery.md and its charts from a run: `python docs/bench/battery_report.py`."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.gate.verdict import Check

PAGE, CHARTS = Path("docs/battery.md"), Path("docs/battery.png")
ROUNDS = sorted(path.parent.parent.name for path in Path("rounds").glob("*/battery/metrics.json"))
SHOWN_TEXTS = 4  # per round
HEAD = """# The reward models of the default run, tested

The stage `battery` tests a reward model before PPO optimises against it. This page shows the tests
of the default run ([default.md](default.md)). It is written by
`python docs/bench/battery_report.py` after `make run`. [gates.md](gates.md) explains each metric
and its threshold.

![Probes and endings, reliability, best-of-n](battery.png)

- Top left, probes: the share of good texts that score below their own corrupted copy. Endings: the
  share of correctly ranked pairs that are reversed if the ending is appended to the rejected text.
  Bars are 95% intervals. A cross shows how often the primary judge makes the same error with
  an ending.
- Top right: accuracy by kind of pair.
- Bottom left: scores by kind of text (median, quartiles, range; in standard deviations of
  demonstrations).
- Bottom middle: the confidence sigmoid(|margin|) against the share of held-out pairs ranked right.
- Bottom right: judge score of the best of n SFT samples, chosen by the reward model.

In the last tables, `word_salad` is a text with its words shuffled, `truncated` is one cut in half,
and `repeated_word` is one word repeated. [gates.md](gates.md) explains mined endings.

`dvc plots show` has the same plots of any run.
"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def draw_charts() -> Figure:
    """All charts of the page, with one colour per round."""
    figure, axes = plt.subplot_mosaic(
        [["probes", "probes", "slices"], ["scores", "reliability", "best"]],
        figsize=(14, 8.4),
        layout="constrained",
    )
    for number, name in enumerate(ROUNDS):
        battery, colour = Path("rounds", name, "battery"), f"C{number}"
        draw_rates(axes["probes"], battery / "probes.csv", ("probe", "rate"), name, colour)
        draw_judge_crosses(axes["probes"], battery / "metrics.json", colour)
        draw_rates(axes["slices"], battery / "accuracy.csv", ("slice", "accuracy"), name, colour)
        draw_scores(axes["scores"], battery / "scores.csv", number * 0.35, colour)
        bins = rows(Path("rounds", name, "reward/calibration.csv"))
        predicted, observed = (
            [float(row[column]) for row in bins] for column in ("predicted", "observed")
        )
        axes["reliability"].plot(predicted, observed, "o-", label=name)
        curve = rows(battery / "curves.csv")
        judge = [float(row["judge_score"]) for row in curve]
        axes["best"].plot([int(row["step"]) for row in curve], judge, "o-", label=name)
    axes["reliability"].plot([0.5, 1], [0.5, 1], ":", color="grey")
    axes["probes"].set(
        title="scores above the better text", xlabel="share of texts or pairs", xlim=(0, 1)
    )
    axes["slices"].set(title="held-out accuracy", xlim=(0.5, 1))
    axes["scores"].set(title="scores")
    axes["reliability"].set(title="reliability", xlabel="sigmoid(|margin|)", ylabel="share right")
    axes["best"].set(
        title="best of n by the reward model", xlabel="n", ylabel="judge score", xscale="log"
    )
    axes["best"].set_xticks([1, 4, 16], ["1", "4", "16"])
    for name, axis in axes.items():
        if name != "scores":
            axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    for name in ("probes", "slices", "scores"):
        axes[name].invert_yaxis()
    return figure


def draw_rates(axis: Axes, path: Path, columns: tuple[str, str], name: str, colour: str) -> None:
    """One point per row, with its interval; rows without a value are left out."""
    label, value = columns
    measured = [row for row in rows(path) if row[value]]
    rates = [float(row[value]) for row in measured]
    spread = [
        [rate - float(row["low"]) for rate, row in zip(rates, measured, strict=True)],
        [float(row["high"]) - rate for rate, row in zip(rates, measured, strict=True)],
    ]
    labels = [ascii(row[label])[1:-1] for row in measured]  # endings may contain line breaks
    axis.errorbar(
        rates, labels, xerr=spread, fmt="o", label=name, alpha=0.8, capsize=2, color=colour
    )


def draw_judge_crosses(axis: Axes, path: Path, colour: str) -> None:
    """How often each ending misleads the primary judge."""
    metrics = json.loads(path.read_text())
    texts, endings = metrics["endings_text"], metrics["endings"].values()
    rates = {
        f"ending {text!r}": ending["judge_rate"]
        for text, ending in zip(texts, endings, strict=True)
    }
    labels = [ascii(label)[1:-1] for label in rates]
    axis.plot(list(rates.values()), labels, "x", color=colour)


def draw_scores(axis: Axes, path: Path, offset: float, colour: str) -> None:
    """One box of scores per kind of text."""
    scores: dict[str, list[float]] = {}
    for row in rows(path):
        scores.setdefault(row["scored"], []).append(float(row["score"]))
    style = {"color": colour}
    axis.boxplot(
        list(scores.values()),
        positions=[index + offset for index in range(len(scores))],
        orientation="horizontal",
        whis=(0, 100),
        boxprops=style,
        medianprops=style,
        widths=0.3,
    )
    axis.set_yticks(range(len(scores)), list(scores))


def format_value(check: Check) -> str:
    """A check's value, bold if the check failed."""
    text = "not measured" if check["value"] is None else f"{check['value']:.3g}"
    return text if check["passed"] else f"**{text}**"


def page() -> str:
    """The text of docs/battery.md: the gate, and the texts that score above better ones."""
    text = HEAD
    verdicts = [
        json.loads(Path("reports", name, "gate_reward.json").read_text()) for name in ROUNDS
    ]
    text += f"\n## The gate\n\n| metric | threshold | {' | '.join(ROUNDS)} |\n"
    text += f"|---|---|{'---:|' * len(ROUNDS)}\n"
    for checks in zip(*(verdict["checks"] for verdict in verdicts), strict=True):
        values = " | ".join(format_value(check) for check in checks)
        text += f"| `{checks[0]['metric']}` | {checks[0]['threshold']} | {values} |\n"
    for name in ROUNDS:
        path = Path("rounds", name, "battery/samples.jsonl")
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        reversals = [row for row in samples if row["kind"] == "reversed"]
        text += f"\n## {name}: texts that score above better ones\n\n"
        text += "| test | text | score | better text | score |\n|---|---|---:|---|---:|\n"
        reversals.sort(key=lambda row: row["original_score"] - row["score"])
        for row in reversals[:SHOWN_TEXTS]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else "..."
            worse, better = (cell(prompt + row[key]) for key in ("text", "original"))
            text += f"| {row['name']} | {worse} | {row['score']:.2f} "
            text += f"| {better} | {row['original_score']:.2f} |\n"
    return text


def cell(text: str) -> str:
    """A text that fits into one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    draw_charts().savefig(CHARTS, dpi=90)
    PAGE.write_text(page(), encoding="utf-8")
