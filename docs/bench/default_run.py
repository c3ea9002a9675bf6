"""The tables about the default run in README.md and docs/default.md, from rounds/*/metrics.json.

    python docs/bench/default_run.py          # prints both
    python docs/bench/default_run.py --write  # replaces them in the two files

tests/test_readme.py compares the files with what this prints, so that they cannot go stale.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from flows.core.locks import current_locks
from flows.core.tables import render_text
from flows.report import summary
from stages.lib.core.recorder import read_metrics

ROUNDS = ("r0", "r1")
MARKERS = "<!-- default run -->\n", "<!-- end -->"


def answer(low: float, high: float) -> str:
    """Whether a win rate with this interval decides for the first side."""
    return "yes" if low > 0.5 else "no" if high < 0.5 else "undecided"


def questions() -> str:
    """README's four questions with the first round's answers, and the second's where it differs."""
    sft, reward, battery, evaluation = (
        read_metrics("r0", stage) for stage in ("sft", "reward", "battery", "evaluate")
    )
    later_battery, later = read_metrics("r1", "battery"), read_metrics("r1", "evaluate")
    learnt = "yes" if sft["loss_after"] < sft["loss_before"] else "no"
    rows = {
        "Did SFT learn the demonstrations?": f"{learnt}: held-out loss {sft['loss_before']:.2f} → "
        f"{sft['loss_after']:.2f} nats per token",
        "Can PPO trust the reward model?": "it ranks "
        f"{percent(reward, 'accuracy')} of held-out human pairs correctly. The most harmful "
        f"*ending*, a short text appended to the rejected response, reverses "
        f"{battery['worst_ending']:.0%} of the correctly ranked pairs against the judge's opinion "
        f"(second round: {later_battery['worst_ending']:.0%})",
        "Did PPO help?": f"{answer(evaluation['win_rate_low'], evaluation['win_rate_high'])}: the "
        f"policy wins {percent(evaluation, 'win_rate')} of its comparisons with SFT by the jury, "
        f"which is {by_judge(evaluation)}. The KL from SFT is {evaluation['ppo']['kl']:.1f} nats",
        "Is the second round's policy better than the first round's policy?": answer(
            later["win_rate_champion_equal_kl_low"], later["win_rate_champion_equal_kl_high"]
        )
        + f": at equal KL, it wins {percent(later, 'win_rate_champion_equal_kl')} of their "
        f"comparisons by the same jury; as they are, {percent(later, 'win_rate_champion')}",
    }
    lines = ["| question | answer of the default run, with 95% intervals |", "|---|---|"]
    return "\n".join([*lines, *(f"| {title} | {text} |" for title, text in rows.items())]) + "\n"


def percent(metrics: dict[str, Any], name: str) -> str:
    low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
    return f"{metrics[name]:.0%} [{low:.0%}, {high:.0%}]"


def by_judge(evaluation: dict[str, Any]) -> str:
    """The win rate of each judge, the primary one first and then those that agree more with it; and
    how often the first two prefer the same text.
    """
    primary, pairs = evaluation["judge"], evaluation["jury"]["pairs"]
    agreements = {
        pair.removeprefix(f"{primary}-"): row["agreement"]
        for pair, row in pairs.items()
        if pair.startswith(f"{primary}-")
    }
    others = sorted(agreements, key=lambda name: -agreements[name])
    rates = [f"`{name}` {percent(evaluation, f'win_rate_{name}')}" for name in (primary, *others)]
    together = f"`{primary}` and `{others[0]}` agree on {agreements[others[0]]:.0%}"
    return f"{', '.join(rates[:-1])} and {rates[-1]}; {together}"


def rounds_table() -> str:
    """The table over rounds of docs/default.md."""
    table = summary.table(list(ROUNDS), current_locks(), markdown=True)
    return render_text(table).strip() + "\n"


TABLES = {"README.md": questions, "docs/default.md": rounds_table}


def replace(text: str, table: str) -> str:
    """The text with this table between its two markers."""
    begin, end = MARKERS
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"expected one {begin.strip()} ... {end}"
    return pattern.sub(lambda _: begin + "\n" + table + "\n" + end, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name, table in TABLES.items():
        print(table())
        if options.write:
            Path(name).write_text(replace(Path(name).read_text(), table()))
