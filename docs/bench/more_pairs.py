"""What more pairs, or an ensemble, would give: best-of-16 by reward models of fewer and all pairs.

    python docs/bench/more_pairs.py --set seed=1    # after `make run`; prints a Markdown table

Each reward model is trained as the reward stage does, on a quarter, half or all of round r0's
pairs, or three times on all of them (an ensemble: the mean of the scores). All choose among the
same samples of SFT for PPO's prompts. Best-of-n has the same KL whatever chooses, at most
log n - (n - 1) / n nats, so the gains compare at equal KL. A judge that chooses by its own scores
is the most that a reward model could give by it. Intervals are 95%, over prompts.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from audit_models import ROUND, SFT, train

from flows.core.config import resolve
from stages.battery.best_of_n import ScoredSamples, sample_and_score
from stages.lib.core.files import stage_dir
from stages.lib.core.rows import PreferencePair, TrainingPrompt, read_rows
from stages.lib.data.splits import dedupe_prompts, shuffled
from stages.lib.judging.loading import base_model, load_judge, load_primary_judge
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.stats import paired_bootstrap

MODELS = Path(".rondo/more_pairs")
PROMPTS, N = 192, 16
JUDGES = ("lexicon", "zero_shot")
SHARES = {"quarter": 0.25, "half": 0.5, "all": 1.0, "again": 1.0, "a third time": 1.0}
ENSEMBLE = ("all", "again", "a third time")


def first(share: float, rows: list[PreferencePair]) -> list[PreferencePair]:
    return shuffled(rows, 0)[: round(share * len(rows))]


def rises(
    samples: ScoredSamples, scores: Sequence[float], values: Sequence[float]
) -> list[list[float]]:
    """For each prompt the value of the sample with the highest score, above the samples' mean."""
    chooser = replace(samples, scores=list(scores))
    best, single = chooser.best_of(N, values), chooser.best_of(1, values)
    return [[b - a] for a, b in zip(single, best, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    params = resolve("keep", None, parser.parse_args().set)
    setup_torch(params)
    for seed, (name, share) in enumerate(SHARES.items()):
        if not (MODELS / name).exists():
            train(partial(first, share), MODELS / name, params.seed + seed)

    rows = read_rows(TrainingPrompt, stage_dir(ROUND, "prepare") / "data/prompts_train.jsonl")
    tokenizer, model = load_tokenizer(SFT), load_causal_lm(SFT, params.model)
    scorer = RewardScorer(MODELS / "all", params)
    primary = load_primary_judge(params, ROUND)
    chosen = shuffled(dedupe_prompts(rows), params.seed)[:PROMPTS]
    samples = sample_and_score(model, tokenizer, scorer, primary, chosen, N, params)
    prompts = [prompt for prompt in samples.prompts for _ in range(N)]
    values = {
        name: load_judge(name, params, ROUND, base_model(params)).scores(prompts, samples.texts)
        or []
        for name in JUDGES
    }
    scores = {name: RewardScorer(MODELS / name, params)(prompts, samples.texts) for name in SHARES}
    members = zip(*(scores[name] for name in ENSEMBLE), strict=True)
    scores["ensemble of the three"] = [sum(of_one) / len(ENSEMBLE) for of_one in members]

    print(f"| chosen by | {' | '.join(f'{name}: gain | share of its most' for name in JUDGES)} |")
    print("|---" * (1 + 2 * len(JUDGES)) + "|")
    for name, by in {**scores, **values}.items():
        cells = []
        for judge in JUDGES:
            most, *_ = paired_bootstrap(rises(samples, values[judge], values[judge]), 1, 0)
            gain = rises(samples, by, values[judge])
            rise, low, high = paired_bootstrap(gain, params.evaluate.bootstrap_resamples, 0)
            cells.append(f"{rise:.3f} [{low:.3f}, {high:.3f}] | {rise / most:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
