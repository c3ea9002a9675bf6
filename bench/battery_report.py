"""docs/battery.md and its picture, from the files of a run: `python bench/battery_report.py`."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from stages.gate.verdict import Check

PAGE, PICTURE = Path("docs/battery.md"), Path("docs/battery.png")
ROUNDS = sorted(path.parent.parent.name for path in Path("rounds").glob("*/battery/metrics.json"))
HEAD = """# The reward models of the default run, tested

The stage `battery` tests a reward model before PPO optimises against it. This page shows the tests
of the default run ([default.md](default.md)). It is written by `python bench/battery_report.py`
after `make run`. [gates.md](gates.md) explains each metric and its threshold.

![Probes and endings, reliability, best-of-n](battery.png)

- Top left, probes: the share of good texts that score below their own corrupted copy. Endings: the
  share of correctly ranked pairs that are reversed if the ending is appended to the rejected text.
  Bars are 95% intervals. A cross is the rate of the judge, the sentiment lexicon.
- Top right: accuracy by kind of pair.
- Bottom left: scores by kind of text (median, quartiles, range; in standard deviations of
  demonstrations).
- Bottom middle: the confidence sigmoid(margin) against the share of held-out pairs ranked right.
- Bottom right: judged sentiment (lexicon) of the best of n SFT samples, chosen by the reward model.

`dvc plots show` has the same plots of any run.
"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def picture() -> None:
    figure, axes = plt.subplot_mosaic(
        [["probes", "probes", "slices"], ["scores", "reliability", "best"]],
        figsize=(14, 8.4),
        layout="constrained",
    )
    for number, name in enumerate(ROUNDS):
        battery, colour = Path("rounds", name, "battery"), f"C{number}"
        rates(axes["probes"], battery / "probes.csv", ("probe", "rate"), name, colour)
        endings = json.loads((battery / "metrics.json").read_text())
        told = {
            f"ending {text!r}": each["judged"]
            for text, each in zip(endings["endings_text"], endings["endings"].values(), strict=True)
        }
        axes["probes"].plot(
            list(told.values()), [ascii(ending)[1:-1] for ending in told], "x", color=colour
        )
        rates(axes["slices"], battery / "accuracy.csv", ("slice", "accuracy"), name, colour)
        scored: dict[str, list[float]] = {}
        for row in rows(battery / "scores.csv"):
            scored.setdefault(row["scored"], []).append(float(row["score"]))
        places = [place + number * 0.35 for place in range(len(scored))]
        style = {"color": colour}
        axes["scores"].boxplot(
            list(scored.values()),
            positions=places,
            orientation="horizontal",
            whis=(0, 100),
            boxprops=style,
            medianprops=style,
            widths=0.3,
        )
        axes["scores"].set_yticks(range(len(scored)), list(scored))
        bins = rows(Path("rounds", name, "reward/calibration.csv"))
        axes["reliability"].plot(
            [float(row["predicted"]) for row in bins],
            [float(row["observed"]) for row in bins],
            "o-",
            label=name,
        )
        curve = rows(battery / "curves.csv")
        axes["best"].plot(
            [int(row["step"]) for row in curve],
            [float(row["sentiment"]) for row in curve],
            "o-",
            label=name,
        )
    axes["reliability"].plot([0.5, 1], [0.5, 1], ":", color="grey")
    axes["probes"].set(
        title="beats what it should lose to", xlabel="share of texts or pairs", xlim=(0, 1)
    )
    axes["slices"].set(title="held-out accuracy", xlim=(0.5, 1))
    axes["scores"].set(title="scores")
    axes["reliability"].set(title="reliability", xlabel="sigmoid(|margin|)", ylabel="share right")
    axes["best"].set(
        title="best of n by the reward model", xlabel="n", ylabel="judged sentiment", xscale="log"
    )
    axes["best"].set_xticks([1, 4, 16], ["1", "4", "16"])
    for name, axis in axes.items():
        if name != "scores":
            axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    for name in ("probes", "slices", "scores"):
        axes[name].invert_yaxis()
    figure.savefig(PICTURE, dpi=90)


def rates(axis: Axes, path: Path, columns: tuple[str, str], name: str, colour: str) -> None:
    """Each row's rate with its interval."""
    label, value = columns
    tried = [row for row in rows(path) if row[value]]
    found = [float(row[value]) for row in tried]
    spread = [
        [rate - float(row["low"]) for rate, row in zip(found, tried, strict=True)],
        [float(row["high"]) - rate for rate, row in zip(found, tried, strict=True)],
    ]
    texts = [ascii(row[label])[1:-1] for row in tried]
    axis.errorbar(
        found, texts, xerr=spread, fmt="o", label=name, alpha=0.8, capsize=2, color=colour
    )


def shown(line: Check) -> str:
    return "not measured" if line["value"] is None else f"{line['value']:.3g}"


def page() -> str:
    text = HEAD
    verdicts = {
        name: json.loads(Path("reports", name, "gate_reward.json").read_text()) for name in ROUNDS
    }
    text += f"\n## The gate\n\n| metric | threshold | {' | '.join(ROUNDS)} |\n"
    text += f"|---|---|{'---:|' * len(ROUNDS)}\n"
    for lines in zip(*(verdicts[name]["checks"] for name in ROUNDS), strict=True):
        told = [shown(line) if line["passed"] else f"**{shown(line)}**" for line in lines]
        text += f"| `{lines[0]['metric']}` | {lines[0]['band']} | {' | '.join(told)} |\n"
    for name in ROUNDS:
        samples = [
            json.loads(line)
            for line in Path("rounds", name, "battery/samples.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
        fooled = [row for row in samples if row["kind"] == "fooled"]
        text += f"\n## {name}: texts that score above better ones\n\n"
        text += "| test | text | score | better text | score |\n|---|---|---:|---|---:|\n"
        for row in sorted(fooled, key=lambda row: row["original_score"] - row["score"])[:8]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else "..."
            texts = [
                (prompt + each).replace("|", "\\|").replace("\n", " ")
                for each in (row["text"], row["original"])
            ]
            text += f"| {row['name']} | {texts[0]} | {row['score']:.2f} | {texts[1]} | {row['original_score']:.2f} |\n"
    return text


if __name__ == "__main__":
    picture()
    PAGE.write_text(page(), encoding="utf-8")
