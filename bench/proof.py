"""Runs the experiments of docs/log.md: whole runs over seeds, alternatives to PPO, a KL sweep.

`python bench/proof.py run RESULTS.jsonl --seeds 0 1 2 --sweep 0` runs the default with both rounds
per seed, then the alternatives and a sweep of PPO's KL coefficient on its first round. Use a clone
of the repository: it rewrites params.yaml. If it is stopped, the same command resumes it.
`python bench/proof.py show RESULTS.jsonl` prints the tables. Stage `evaluate` judges every policy
on the frozen prompts.
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
SWEEP = (0.0, 0.03, 0.1, 0.3)  # values of ppo.kl_coef
# Settings of the sweep: nothing but the KL coefficient limits the distance from SFT.
UNLIMITED = (
    "ppo.kl_control=fixed",
    "ppo.max_kl_per_token=1000",
    "ppo.on_danger=warn",
    "ppo.total_episodes=960",
    "ppo.save_updates=5",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=["run", "show"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alternatives", nargs="*", default=ALTERNATIVES, choices=ALTERNATIVES)
    parser.add_argument(
        "--sweep",
        type=int,
        nargs="*",
        default=[0],
        help="seeds for the sweep of the KL coefficient",
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
    """Name and settings of the runs of one seed; the default, which the others need, is first."""
    yield "ppo", ()
    for name in alternatives:
        yield name, ALTERNATIVES[name]
    for beta in SWEEP if sweep else ():
        yield f"beta {beta}", (*UNLIMITED, f"ppo.kl_coef={beta}")


def measure(seed: int, variant: str, settings: tuple[str, ...]) -> list[Row]:
    """Run a variant and return its metrics, one row per round.

    The default runs all stages of both rounds, even if gates fail. Other variants run policy and
    evaluation of the first round, on the default's SFT and reward model.
    """
    whole = not settings
    policies = [f"gates.{gate}.policy=warn" for gate in ("sft", "reward", "promote")]
    write_params(resolve(DEFAULT, 2 if whole else 1, [f"seed={seed}", *policies, *settings]))
    print(f"seed {seed}: {variant}", flush=True)
    targets = [] if whole else ["evaluate@r0"]
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q", *targets], check=True)
    names = ["r0", "r1"] if whole else ["r0"]
    stages = STAGES if whole else ("ppo", "evaluate")
    return [
        {"seed": seed, "variant": variant, "round": name}
        | {stage: read_json(stage_dir(name, stage) / "metrics.json", "") for stage in stages}
        for name in names
    ]


def show(rows: list[Row]) -> None:
    """Print the tables of docs/log.md."""
    whole = [row for row in rows if row["variant"] == "ppo"]
    first = [row for row in rows if row["round"] == "r0"]
    swept = [row for row in first if row["variant"].startswith("beta")]
    show_rounds(whole)
    show_replay(whole)
    show_algorithms([row for row in first if row not in swept])
    show_sweep(swept)


def show_rounds(rows: list[Row]) -> None:
    """What SFT and PPO gained in each round, by seed."""
    head(
        "seed, round",
        "SFT against base, jury",
        "wins less losses, SFT against base",
        "PPO against SFT, jury",
        "judge score, PPO - SFT",
        "KL",
    )
    for row in rows:
        evaluate = row["evaluate"]
        base = evaluate["base"]
        # `base` has the win rate of the base model against SFT: the table shows the reverse.
        low, high = 1 - base["win_rate_high"], 1 - base["win_rate_low"]
        line(
            f"{row['seed']}, {row['round']}",
            f"{1 - base['win_rate']:.3f} [{low:.3f}, {high:.3f}]",
            interval(row["sft"], "net_win_rate"),
            interval(evaluate, "win_rate"),
            interval(evaluate, "judge_gain"),
            f"{evaluate['ppo']['kl']:.2f}",
        )


def show_replay(rows: list[Row]) -> None:
    """What the second round gained from replay, by seed; `rows`: r0 and r1 of each seed in turn."""
    head(
        "seed",
        "RM accuracy, r0",
        "r1",
        "reversed by r0's blind spots: r0's RM; r1's",
        "fall",
        "repaired; by chance",
        "came back",
        "r1 against r0",
    )
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        replay = after["replay"]
        repaired = f"{replay['repaired']} of {replay['retested']}"
        line(
            before["seed"],
            *(interval(row["reward"], "accuracy") for row in (before, after)),
            f"{replay['reversed_before']:.2f}; {replay['reversed_after']:.2f}",
            interval(replay, "reversed_fall"),
            f"{repaired}; {replay['repaired_by_chance']}",
            f"{replay['regressed']} of {replay['guarded']}",
            interval(after["evaluate"], "win_rate_champion"),
        )


def show_algorithms(rows: list[Row]) -> None:
    """PPO and its alternatives on the first round."""
    head(
        "seed",
        "algorithm",
        "judge score, policy - SFT",
        "jury",
        "proxy",
        "KL",
        "distinct-2",
        "update kept",
    )
    for row in rows:
        evaluate = row["evaluate"]
        line(
            row["seed"],
            row["variant"],
            interval(evaluate, "judge_gain"),
            interval(evaluate, "win_rate"),
            *(f"{evaluate['ppo'][name]:.2f}" for name in ("score", "kl", "distinct_2")),
            f"{row['ppo']['policy_update']} of {row['ppo']['updates']}",
        )


def show_sweep(rows: list[Row]) -> None:
    """Over-optimisation by KL coefficient: checkpoints, and Gao's law fitted to them."""
    head(
        "seed",
        "beta",
        "KL: judge score, proxy, distinct-2 at the checkpoints",
        "Gao's peak, nats; measured",
    )
    for row in rows:
        points = (
            f"{metrics['kl']:.1f}: {metrics['judge_score']:.2f}, {metrics['score']:.1f}, "
            f"{metrics['distinct_2']:.2f}"
            for metrics in checkpoints(row)
        )
        line(
            row["seed"],
            row["variant"].removeprefix("beta "),
            " · ".join(points),
            peaks(row["evaluate"]["overoptimisation"]),
        )
    for seed in sorted({row["seed"] for row in rows}):
        law = fit_law([row for row in rows if row["seed"] == seed])
        coefficients = f"alpha {law['alpha']:.3f}, beta {law['beta']:.3f}, rmse {law['rmse']:.3f}"
        line(seed, "all", f"{coefficients}, {law['points']} points", peaks(law))


def head(*titles: str) -> None:
    """Print an empty line and the head of a Markdown table."""
    print()
    line(*titles)
    line(*("---" for _ in titles))


def line(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def fit_law(rows: list[Row]) -> Row:
    """Gao's law fitted to SFT and the checkpoints of all betas of one seed."""
    start = rows[0]["evaluate"]["sft"]
    models = [start, *(metrics for row in rows for metrics in checkpoints(row))]
    return overoptimisation(
        [
            Point(number, metrics["kl"], metrics["score"], metrics["judge_score"])
            for number, metrics in enumerate(models)
        ]
    )


def checkpoints(row: Row) -> list[Row]:
    """The metrics of a run's checkpoints, in order of their updates."""
    return [metrics for _, metrics in sorted(row["evaluate"]["checkpoints"].items())]


def peaks(law: Row) -> str:
    """The KL of the fitted and of the measured peak."""
    fitted = "none" if law["peak_kl"] is None else f"{law['peak_kl']:.1f}"
    return f"{fitted}; {law['measured_peak_kl']:.1f}"


def interval(metrics: Row, name: str) -> str:
    """A metric with its 95% interval; `-` if there was no champion to compare with."""
    if metrics[name] is None:
        return "-"
    return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"


if __name__ == "__main__":
    main()
