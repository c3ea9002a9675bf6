"""What more pairs, or an ensemble, would give: best-of-16 by reward models of fewer and all pairs.

    python docs/bench/more_pairs.py    # after `make run`; prints a Markdown table

Each reward model is trained as the reward stage does, on a quarter, half or all of round r0's
pairs, or three times on all of them (an ensemble: the mean of the scores). All choose among the
same samples of SFT for PPO's prompts. Best-of-n has the same KL whatever chooses, at most
log n - (n - 1) / n nats, so the gains compare at equal KL. A judge that chooses by its own scores
is the most that a reward model could give by it. Intervals are 95%, over prompts.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from audit_models import ROUND, SFT, train

from stages.battery.metrics import best_of_n
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import PreferencePair, TrainingPrompt, read_rows
from stages.lib.data.splits import dedupe_prompts, shuffled
from stages.lib.judging.loading import base_model, load_judge
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.responses import responder
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.stats import Interval, mean, paired_bootstrap

MODELS = Path(".rondo/more_pairs")
PROMPTS, N = 192, 16
JUDGES = ("lexicon", "zero_shot")
SHARES = {"quarter": 0.25, "half": 0.5, "all": 1.0, "again": 1.0, "a third time": 1.0}
ENSEMBLE = ("all", "again", "a third time")


def first(share: float, rows: list[PreferencePair]) -> list[PreferencePair]:
    return shuffled(rows, 0)[: round(share * len(rows))]


def gain(scores: Sequence[float], values: Sequence[float], resamples: int) -> Interval:
    """How much higher the value of a prompt's sample with the highest score is than their mean.

    Args:
        scores, values: by what is chosen and what it gives, N per prompt, those of a prompt adjoin.
    """
    rises = []
    for start in range(0, len(scores), N):
        of_prompt = slice(start, start + N)
        best = best_of_n(scores[of_prompt], values[of_prompt], N)
        rises.append([best - mean(values[of_prompt])])
    return paired_bootstrap(rises, resamples, 0)


def main() -> None:
    params = load_params()
    setup_torch(params)
    for number, (name, share) in enumerate(SHARES.items()):
        if not (MODELS / name).exists():
            train(partial(first, share), MODELS / name, number)

    rows = read_rows(TrainingPrompt, stage_dir(ROUND, "prepare") / "data/prompts_train.jsonl")
    chosen = shuffled(dedupe_prompts(rows), params.seed)[:PROMPTS]
    prompts = [row["prompt"] for row in chosen for _ in range(N)]
    respond = responder(params, load_tokenizer(SFT))
    responses = respond(load_causal_lm(SFT, params.model), prompts, params.seed)
    texts = [response.text for response in responses]
    base = base_model(params)
    values = {
        name: load_judge(name, params, ROUND, base).scores(prompts, texts) or [] for name in JUDGES
    }
    scores = {name: RewardScorer(MODELS / name, params)(prompts, texts) for name in SHARES}
    members = zip(*(scores[name] for name in ENSEMBLE), strict=True)
    scores["ensemble of the three"] = [mean(of_text) for of_text in members]

    print(f"| chosen by | {' | '.join(f'{name}: gain | share of its most' for name in JUDGES)} |")
    print("|---" * (1 + 2 * len(JUDGES)) + "|")
    most = {name: gain(values[name], values[name], 1)[0] for name in JUDGES}
    for name, by in {**scores, **values}.items():
        cells = []
        for judge in JUDGES:
            rise, low, high = gain(by, values[judge], params.evaluate.bootstrap_resamples)
            cells.append(f"{rise:.3f} [{low:.3f}, {high:.3f}] | {rise / most[judge]:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
