"""The battery stage: tests of a reward model that its held-out accuracy does not cover.

Accuracy per slice, the score scale that PPO starts from, best-of-n, corrupted texts, appended
endings. Reads the data of prepare, the SFT model, and the reward model with its `scores.jsonl`;
after the first round also the rollouts of the previous round's PPO, for phrases to try. Writes
metrics.json, samples.jsonl, the tables probes.csv, accuracy.csv and scores.csv, and curves.csv
(best-of-n) to rounds/<round>/battery. The gate `reward` reads metrics.json. Without a reward model
there is nothing to test, and the files have no rows.

Run: `python -m stages.battery --round r0`.
"""

from pathlib import Path

from stages.battery.best_of_n import (
    best_of_n_curve,
    demonstration_scores,
    rise_by_second_model,
    sample_and_score,
    score_metrics,
)
from stages.battery.metrics import (
    disjoint_pairs,
    lineage_distance,
    pair_agreement,
    pair_metrics,
    text_scores,
)
from stages.battery.probes import (
    ending_metrics,
    ending_outcomes,
    flip_metrics,
    phrases_to_try,
    probe_metrics,
    run_corruption_probes,
    run_ending_probes,
    word_uplifts,
)
from stages.battery.report import (
    best_and_worst,
    format_metric,
    with_judge_scores,
    worst_failures,
    write_plots,
)
from stages.lib.core.files import is_placeholder, stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import NOT_MEASURED, MetricLogger, write_manifest
from stages.lib.core.rows import (
    SIDES,
    PreferencePair,
    RewardScores,
    TrainingPrompt,
    read_rows,
)
from stages.lib.core.stage import stage_main
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template, pairs_with_room_for_ending, template_hash
from stages.lib.data.splits import calibration_demonstrations, dedupe_prompts, shuffled
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import world
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.scoring import RewardScorer

# the metrics of the stage's last line of output
WORST = ("worst_slice", "worst_probe", "worst_flip", "worst_ending", "worst_mined")
SUMMARY = (*WORST, "drift", "scale", "judge_correlation")


def main(params: Params, round_: str) -> None:
    setup_torch(params)
    if is_placeholder(stage_dir(round_, "reward") / "model"):
        write_nothing_tested(params, round_)
    else:
        try_reward_model(params, round_)


def try_reward_model(params: Params, round_: str) -> None:
    # 1. the models, and the held-out pairs with the scores that the reward stage wrote
    check_unchanged("primary_judge", params)
    config, folder = params.battery, stage_dir(round_, "battery")
    data = stage_dir(round_, "prepare") / "data"
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    recorder = MetricLogger("battery", round_, 5, writes=world.is_main())
    tokenizer, model = load_tokenizer(sft / "model"), load_causal_lm(sft / "model", params.model)
    for manifest in (sft / "manifest.json", reward / "manifest.json"):
        check_template(manifest, tokenizer, params.prepare.prompt_format)
    scorer = RewardScorer(reward / "model", params)
    demonstrations = calibration_demonstrations(round_, params.seed)
    prompts = read_rows(TrainingPrompt, data / "prompts_train.jsonl")
    held_out, pair_scores = scored_pairs(data, reward)
    judge = load_primary_judge(params, round_)

    # 2. held-out accuracy per slice, the judge's agreement with the labels, the effect of length,
    # and whether the reward model descends from the policy's model
    judge_scores = text_scores(held_out, judge)
    metrics = pair_metrics(held_out, pair_scores, judge_scores, params)
    metrics |= pair_agreement(held_out, pair_scores, judge, params)
    metrics["lineage_distance"] = lineage_distance(scorer.model, model)
    recorder.log_progress(1, f"worst slice {format_metric(metrics['worst_slice'])}")

    # 3. what PPO starts from: SFT samples beside demonstrations, and if a higher score is better
    rows = shuffled(dedupe_prompts(prompts), params.seed)[: config.prompts]
    samples = sample_and_score(model, tokenizer, scorer, judge, rows, max(config.best_of), params)
    scores = {
        "demonstrations": demonstration_scores(demonstrations, scorer),
        "chosen": [chosen for chosen, _ in pair_scores],
        "rejected": [rejected for _, rejected in pair_scores],
        "sft_samples": samples.scores,
    }
    metrics |= score_metrics(scores, samples)
    metrics["best_of_n"] = best_of_n_curve(samples, judge, params)
    metrics |= rise_by_second_model(samples, params, round_)
    rise = f"best of {max(config.best_of)} {metrics['best_of_n']['rise']:+.3f} by the judge"
    recorder.log_progress(2, f"{len(samples.texts)} SFT samples: {rise}")

    # 4. corrupted chosen texts, and pairs under edits that keep the meaning
    roomy = shuffled(pairs_with_room_for_ending(held_out, tokenizer, params), params.seed)
    pairs = disjoint_pairs(roomy)[: config.pairs]
    chosen, rejected = (
        scorer([row["prompt"] for row in pairs], [row[side] for row in pairs]) for side in SIDES
    )
    word_scores = word_uplifts(held_out, pair_scores)
    probes = run_corruption_probes(pairs, chosen, scorer, word_scores, params.seed)
    metrics |= probe_metrics(probes)
    metrics |= flip_metrics(pairs, chosen, rejected, scorer, params)
    worst, flip = (format_metric(metrics[name]) for name in ("worst_probe", "worst_flip"))
    recorder.log_progress(3, f"{len(pairs)} texts corrupted: worst probe {worst}, flip {flip}")

    # 5. rejected texts with an appended ending: the listed endings, and phrases that go with high
    # scores in the SFT samples and in the previous round's rollouts
    phrases = phrases_to_try(Path(params.rounds[round_].previous), samples, config.endings)
    endings = [*config.endings, *phrases]
    ending_results = run_ending_probes(endings, pairs, chosen, rejected, scorer)
    judge_outcomes = ending_outcomes(ending_results, judge)
    metrics |= ending_metrics(ending_results, judge_outcomes, config.endings, phrases)
    worst, mined = (format_metric(metrics[name]) for name in ("worst_ending", "worst_mined"))
    recorder.log_progress(4, f"endings: worst listed {worst}, worst mined {mined} of {phrases}")

    # 6. write, also the texts that show the most
    names = [f"ending {ending!r}" for ending in endings]
    results = probes | dict(zip(names, ending_results, strict=True))
    shown = with_judge_scores([*best_and_worst(samples), *worst_failures(results)], judge)
    if not world.is_main():
        return
    write_jsonl(folder / "samples.jsonl", shown)
    write_plots(folder, metrics, scores, results)
    for n in sorted(config.best_of):
        recorder.log(n, metrics["best_of_n"][str(n)])
    template = template_hash(tokenizer, params.prepare.prompt_format)
    inputs = [data, sft / "model", reward / "model", reward / "scores.jsonl"]
    write_manifest("battery", round_, seed=params.seed, inputs=inputs, template_hash=template)
    recorder.finish(metrics)
    summary = "  ".join(f"{name} {format_metric(metrics[name])}" for name in SUMMARY)
    print(f"[battery@{round_}] {summary}", flush=True)


def write_nothing_tested(params: Params, round_: str) -> None:
    """The files of the stage if there is no reward model."""
    if not world.is_main():
        return
    folder, reason = stage_dir(round_, "battery"), "not measured: there is no reward model"
    recorder = MetricLogger("battery", round_)
    write_jsonl(folder / "samples.jsonl", [])
    write_plots(folder, {"accuracy": {}}, {}, {})
    inputs = [stage_dir(round_, "reward") / "model"]
    write_manifest("battery", round_, seed=params.seed, inputs=inputs)
    recorder.finish({NOT_MEASURED: reason})
    print(f"[battery@{round_}] {reason}", flush=True)


def scored_pairs(
    data: Path, reward: Path
) -> tuple[list[PreferencePair], list[tuple[float, float]]]:
    """Held-out pairs, and their calibrated scores (chosen, rejected).

    The reward stage leaves out pairs that are longer than reward.max_length.
    """
    pairs = read_rows(PreferencePair, data / "pairs_eval.jsonl")
    scores = {
        row["id"]: (row["chosen"], row["rejected"])
        for row in read_rows(RewardScores, reward / "scores.jsonl")
    }
    scored = [pair for pair in pairs if pair["id"] in scores]
    return scored, [scores[pair["id"]] for pair in scored]


if __name__ == "__main__":
    stage_main("battery", main)
