"""docs/battery.md and its picture, from the files of a run: `python bench/battery_report.py`."""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from stages.gate import Check

PAGE, PICTURE = Path("docs/battery.md"), Path("docs/battery.png")
ROUNDS = sorted(path.parent.parent.name for path in Path("rounds").glob("*/battery/metrics.json"))
HEAD = """# What the battery says of the default's reward models

Written by `python bench/battery_report.py` after `make run`; what each number means, and why its band is where it is: [gates.md](gates.md).

![Probes and endings, reliability, best-of-n](battery.png)

Left: how often a good text loses to itself broken, and how often a rightly ranked pair turns when an ending is put after its rejected
text (95% intervals). Middle: what sigmoid(margin) promises against what held-out pairs keep. Right: SFT's samples chosen by the reward
model, judged by the lexicon.
"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def picture() -> None:
    figure, (probes, reliability, best) = plt.subplots(1, 3, figsize=(14, 4.2), constrained_layout=True, width_ratios=[1.5, 1, 1])
    for number, name in enumerate(ROUNDS):
        tried = [row for row in rows(Path("rounds", name, "battery/probes.csv")) if row["rate"]]
        rates = [float(row["rate"]) for row in tried]
        spread = [
            [r - float(row["low"]) for r, row in zip(rates, tried, strict=True)],
            [float(row["high"]) - r for r, row in zip(rates, tried, strict=True)],
        ]
        probes.errorbar(rates, [f"{ascii(row['probe'])[1:-1]}" for row in tried], xerr=spread, fmt="o", label=name, alpha=0.8, capsize=2)
        bins = rows(Path("rounds", name, "reward/calibration.csv"))
        reliability.plot([float(row["predicted"]) for row in bins], [float(row["observed"]) for row in bins], "o-", label=name)
        curve = rows(Path("rounds", name, "battery/curves.csv"))
        best.plot([int(row["step"]) for row in curve], [float(row["sentiment"]) for row in curve], "o-", label=name)
        if not number:
            reliability.plot([0.5, 1], [0.5, 1], ":", color="grey")
    probes.set(title="beats what it should lose to", xlabel="share of texts or pairs", xlim=(0, 1))
    probes.invert_yaxis()
    reliability.set(title="reliability", xlabel="sigmoid(|margin|)", ylabel="share right")
    best.set(
        title="best of n by the reward model",
        xlabel="n",
        ylabel="judged sentiment",
        xscale="log",
        xticks=[1, 4, 16],
        xticklabels=["1", "4", "16"],
    )
    for axis in (probes, reliability, best):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=100)


def shown(line: Check) -> str:
    return "not measured" if line["value"] is None else f"{line['value']:.3g}"


def page() -> str:
    text = HEAD
    verdicts = {name: json.loads(Path("reports", name, "gate_reward.json").read_text()) for name in ROUNDS}
    text += f"\n## The gate\n\n| number | band | {' | '.join(ROUNDS)} |\n|---|---|{'---:|' * len(ROUNDS)}\n"
    for lines in zip(*(verdicts[name]["checks"] for name in ROUNDS), strict=True):
        told = [shown(line) if line["passed"] else f"**{shown(line)}**" for line in lines]
        text += f"| `{lines[0]['metric']}` | {lines[0]['band']} | {' | '.join(told)} |\n"
    for name in ROUNDS:
        samples = [json.loads(line) for line in Path("rounds", name, "battery/samples.jsonl").read_text(encoding="utf-8").splitlines()]
        fooled = [row for row in samples if row["kind"] == "fooled"]
        text += f"\n## {name}: texts that fooled it\n\n| tried | text | score | it should lose to | score |\n|---|---|---:|---|---:|\n"
        for row in sorted(fooled, key=lambda row: row["original_score"] - row["score"])[:8]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else "..."
            texts = [(prompt + each).replace("|", "\\|").replace("\n", " ") for each in (row["text"], row["original"])]
            text += f"| {row['name']} | {texts[0]} | {row['score']:.2f} | {texts[1]} | {row['original_score']:.2f} |\n"
    return text


if __name__ == "__main__":
    picture()
    PAGE.write_text(page(), encoding="utf-8")
