"""The proof in docs/log.md: whole runs over seeds, and on their first rounds the alternatives to
PPO and a sweep of PPO's KL coefficient.

`python bench/proof.py run RESULTS.jsonl --seeds 0 1 2 --sweep 0`, in a clone of its own: it
rewrites params.yaml, and goes on where it was killed. `python bench/proof.py show RESULTS.jsonl`
prints the tables. Every model here is judged on the frozen prompts, by `evaluate`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.core.config import DEFAULT, resolve, write_params
from flows.report.summary import STAGES
from stages.evaluate.overoptimisation import Point, overoptimisation
from stages.lib.core.files import read_json, read_jsonl, stage_dir
from stages.lib.core.types import Row

ALTERNATIVES = {
    "dpo": ("algorithm=dpo",),
    "dpo 1e-4": ("algorithm=dpo", "dpo.learning_rate=0.0001"),
    "best_of_n": ("algorithm=best_of_n",),
    "rloo": ("algorithm=rloo",),
    "grpo": ("algorithm=grpo",),
}
SWEEP = (0.0, 0.03, 0.1, 0.3)  # ppo.kl_coef, fixed
FREE = (
    "ppo.kl_control=fixed",
    "ppo.max_kl=1000",
    "ppo.on_danger=warn",
    "ppo.total_episodes=960",
    "ppo.save_updates=5",
)  # no brake but beta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=["run", "show"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alternatives", nargs="*", default=ALTERNATIVES, choices=ALTERNATIVES)
    parser.add_argument(
        "--sweep", type=int, nargs="*", default=[0], help="the seeds whose KL coefficient is swept"
    )
    options = parser.parse_args()
    if options.do == "show":
        show(read_jsonl(options.results, "python bench/proof.py run"))
        return
    known = read_jsonl(options.results, "") if options.results.exists() else []
    done = {(row["seed"], row["variant"]) for row in known}
    for seed in options.seeds:
        for variant, settings in variants(options.alternatives, seed in options.sweep):
            if (seed, variant) not in done:
                rows = measure(seed, variant, settings)
                with options.results.open("a") as stream:
                    stream.writelines(json.dumps(row) + "\n" for row in rows)


def variants(alternatives: Sequence[str], sweep: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "ppo", ()
    for name in alternatives:
        yield name, ALTERNATIVES[name]
    for beta in SWEEP if sweep else ():
        yield f"beta {beta}", (*FREE, f"ppo.kl_coef={beta}")


def measure(seed: int, variant: str, settings: tuple[str, ...]) -> list[Row]:
    """The default: both rounds, past shut gates; a variant: policy and evaluation of the first
    round, on the default's other stages.
    """
    whole = not settings
    policies = [f"gates.{gate}.policy=warn" for gate in ("sft", "reward", "promote")]
    write_params(resolve(DEFAULT, 2 if whole else 1, [f"seed={seed}", *policies, *settings]))
    print(f"seed {seed}: {variant}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q", *([] if whole else ["evaluate@r0"])],
        check=True,
    )
    names = ["r0", "r1"] if whole else ["r0"]
    stages = STAGES if whole else ("ppo", "evaluate")
    return [
        {"seed": seed, "variant": variant, "round": name}
        | {stage: read_json(stage_dir(name, stage) / "metrics.json", "") for stage in stages}
        for name in names
    ]


def show(rows: list[Row]) -> None:
    whole, first = (
        [row for row in rows if row["variant"] == "ppo"],
        [row for row in rows if row["round"] == "r0"],
    )
    swept = [row for row in first if row["variant"].startswith("beta")]
    head(
        "seed, round",
        "SFT against base, jury",
        "SFT - base, judged",
        "PPO against SFT, jury",
        "PPO - SFT, judged",
        "KL",
    )
    for row in whole:
        told, sft = row["evaluate"], row["sft"]
        base = told["base"]
        low, high = 1 - base["win_rate_high"], 1 - base["win_rate_low"]
        against_base = f"{1 - base['win_rate']:.3f} [{low:.3f}, {high:.3f}]"
        gains = (
            against_base,
            interval(sft, "judged_gain"),
            interval(told, "win_rate"),
            interval(told, "sentiment_gain"),
        )
        line(f"{row['seed']}, {row['round']}", *gains, f"{told['ppo']['kl']:.2f}")
    head(
        "seed",
        "RM accuracy, r0",
        "r1",
        "r0's blind spots fool r0's RM; r1's",
        "fall",
        "repaired; by chance",
        "came back",
        "r1 against r0",
    )
    for before, after in zip(whole[::2], whole[1::2], strict=True):
        replay = after["replay"]
        accuracies = (interval(row["reward"], "accuracy") for row in (before, after))
        fooled = f"{replay['fooled_before']:.2f}; {replay['fooled_after']:.2f}"
        repaired = (
            f"{replay['repaired']} of {replay['tried_again']}; {replay['repaired_by_chance']}"
        )
        came_back, won = (
            f"{replay['regressed']} of {replay['guarded']}",
            interval(after["evaluate"], "win_rate_champion"),
        )
        line(
            before["seed"],
            *accuracies,
            fooled,
            interval(replay, "fooled_fall"),
            repaired,
            came_back,
            won,
        )
    head(
        "seed",
        "algorithm",
        "judged, policy - SFT",
        "jury",
        "proxy",
        "KL",
        "distinct-2",
        "update kept",
    )
    for row in (row for row in first if row not in swept):
        told, policy, kept = (
            row["evaluate"],
            row["evaluate"]["ppo"],
            f"{row['ppo']['policy_update']} of {row['ppo']['updates']}",
        )
        numbers = (f"{policy[name]:.2f}" for name in ("score", "kl", "distinct_2"))
        line(
            row["seed"],
            row["variant"],
            interval(told, "sentiment_gain"),
            interval(told, "win_rate"),
            *numbers,
            kept,
        )
    head(
        "seed",
        "beta",
        "KL: judged, proxy, distinct-2 at the checkpoints",
        "Gao's peak, nats; measured",
    )
    for row in swept:
        way = (
            f"{at['kl']:.1f}: {at['sentiment']:.2f}, {at['score']:.1f}, {at['distinct_2']:.2f}"
            for at in on_the_way(row)
        )
        line(
            row["seed"],
            row["variant"].removeprefix("beta "),
            " · ".join(way),
            peaks(row["evaluate"]["overoptimisation"]),
        )
    for seed in sorted({row["seed"] for row in swept}):
        law = law_of([row for row in swept if row["seed"] == seed])
        fitted = f"alpha {law['alpha']:.3f}, beta {law['beta']:.3f}, rmse {law['rmse']:.3f}, {law['points']} points"
        line(seed, "all", fitted, peaks(law))


def head(*titles: str) -> None:
    print()
    line(*titles)
    line(*("---" for _ in titles))


def line(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def law_of(swept: list[Row]) -> Row:
    """One law through the checkpoints of all betas."""
    start = swept[0]["evaluate"]["sft"]
    ways = [at for row in swept for at in on_the_way(row)]
    return overoptimisation(
        [Point(n, at["kl"], at["score"], at["sentiment"]) for n, at in enumerate([start, *ways])]
    )


def on_the_way(row: Row) -> list[Row]:
    return [at for _, at in sorted(row["evaluate"]["checkpoints"].items())]


def peaks(law: Row) -> str:
    return f"{'none' if law['peak_kl'] is None else format(law['peak_kl'], '.1f')}; {law['measured_peak_kl']:.1f}"


def interval(metrics: Row, name: str) -> str:
    if metrics[name] is None:  # there is no champion to meet
        return "-"
    return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"


if __name__ == "__main__":
    main()
