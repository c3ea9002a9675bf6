"""Draws the chart of docs/default.md from a run: `python docs/bench/plot_run.py docs/run.png`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml

from flows.core.locks import current_locks
from flows.report.round_data import columns
from flows.report.summary import not_comparable

ROUNDS = sorted(path.parent.parent.name for path in Path("rounds").glob("*/evaluate/metrics.json"))


def main(target: str) -> None:
    if lines := not_comparable(ROUNDS, current_locks()):
        raise SystemExit("\n".join(lines))
    figure, (score, kl, against_kl) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    for name in ROUNDS:
        folder = Path("rounds", name)
        steps, curve = columns(folder / "ppo/curves.csv"), columns(folder / "evaluate/curves.csv")
        score.plot(steps["step"], steps["score_mean"], label=name)
        kl.plot(steps["step"], steps["kl_per_token"], label=name)
        by_kl = sorted(zip(curve["kl"], curve["judge_score"], curve["score"], strict=True))
        distance, judge, proxy = zip(*by_kl, strict=True)
        line = against_kl.plot(distance, judge, "o-", label=f"{name}: judge score")[0]
        # a quarter of the score is on the scale of the lexicon
        proxy_style = {
            "color": line.get_color(),
            "alpha": 0.5,
            "label": f"{name}: reward model / 4",
        }
        against_kl.plot(distance, [value / 4 for value in proxy], "x--", **proxy_style)
    budget = yaml.safe_load(Path("params.yaml").read_text())["ppo"]["max_kl_per_token"]
    kl.axhline(budget, color="grey", linestyle=":", label="max_kl_per_token")
    for axis, title, x, y in (
        (score, "PPO: reward-model score", "update", "calibrated score"),
        (kl, "PPO: KL from SFT", "update", "nats per token"),
        (against_kl, "evaluation: judge against reward model", "KL, nats per sequence", ""),
    ):
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/run.png")
