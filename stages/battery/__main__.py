"""The battery stage, top to bottom."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from stages.battery.best_of_n import ScoredSamples, best_of_n_curve, sample_and_score
from stages.battery.metrics import (
    Rate,
    disjoint,
    highest,
    mean_and_std,
    rate,
    slices,
    text_keys,
    win,
    worst_slice,
)
from stages.battery.phrase_mining import mine_phrases
from stages.battery.probes import ProbeResult, run_corruption_probes, run_ending_probes
from stages.battery.report import best_and_worst, worst_failures, write_plots
from stages.lib.core.files import is_placeholder, read_jsonl, stage_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row
from stages.lib.data.corruptions import word_score_uplift
from stages.lib.data.prompts import (
    check_template,
    encode,
    pairs_with_room_for_ending,
    template_hash,
)
from stages.lib.data.rollouts import read_rollouts
from stages.lib.data.splits import dedupe_prompts, shuffled
from stages.lib.lm.loading import load_causal_lm, load_tokenizer, setup_torch
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.sentiment import sentiment
from stages.lib.metrics.stats import (
    connected_groups,
    paired_bootstrap,
    partial_correlation,
    pearson,
)

BATCH = 128  # responses sampled or scored at once
DEMONSTRATIONS = 256  # at most
MINED = 3  # phrases of each origin, at most
Scores = list[tuple[float, float]]  # of each pair: chosen, rejected


def main(params: Params, round_: str) -> None:
    # 1. the models, and the held-out pairs with the scores that the reward stage has given them
    setup_torch(params)
    folder, data = stage_dir(round_, "battery"), stage_dir(round_, "prepare") / "data"
    sft, reward, made_by = (
        stage_dir(round_, "sft"),
        stage_dir(round_, "reward"),
        f"dvc repro prepare@{round_}",
    )
    recorder = MetricLogger("battery", round_, 5)
    tokenizer = load_tokenizer(sft / "model")
    for stage in (sft, reward):
        check_template(stage / "manifest.json", tokenizer, params.prepare.prompt_format)
    model, scorer = (
        load_causal_lm(sft / "model", params.model),
        RewardScorer(reward / "model", tokenizer, params, BATCH),
    )
    held_out, shown, asked = (
        read_jsonl(data / f"{name}.jsonl", made_by)
        for name in ("pairs_eval", "sft_eval", "prompts_train")
    )
    told = {
        row["id"]: (row["chosen"], row["rejected"])
        for row in read_jsonl(reward / "scores.jsonl", f"dvc repro reward@{round_}")
    }
    scores = [told[row["id"]] for row in held_out]

    # 2. where it ranks held-out pairs rightly, whether the judge agrees with the labels, whether
    # length pays
    metrics = pair_metrics(held_out, scores, params)
    recorder.log_progress(
        1, f"{len(held_out)} held-out pairs: worst slice {said(metrics['worst_slice'])}"
    )

    # 3. what PPO starts from: how its scores lie to those of demonstrations, and whether the
    # answers that score higher are better ones
    answers = sample_and_score(
        model,
        scorer,
        shuffled(dedupe_prompts(asked), params.seed)[: params.battery.prompts],
        max(params.battery.best_of),
        params,
    )
    scored = {
        "demonstrations": demonstrations(shown, scorer),
        **sides(scores),
        "sft_samples": answers.scores,
    }
    metrics |= score_metrics(scored, answers) | {"best_of_n": best_of_n_curve(answers, params)}
    recorder.log_progress(
        2,
        f"{len(answers.texts)} SFT samples: best of {max(params.battery.best_of)} {metrics['best_of_n']['rise']:+.3f} by the judge",
    )

    # 4. good texts, corrupted
    pairs = disjoint(
        shuffled(pairs_with_room_for_ending(held_out, tokenizer, params), params.seed)
    )[: params.battery.pairs]
    chosen, rejected = (
        scorer([row["prompt"] for row in pairs], [row[side] for row in pairs])
        for side in ("chosen", "rejected")
    )
    probes = run_corruption_probes(pairs, chosen, scorer, words(held_out, scores), params.seed)
    metrics |= probe_metrics(probes)
    recorder.log_progress(
        3, f"{len(pairs)} texts corrupted: worst probe {said(metrics['worst_probe'])}"
    )

    # 5. bad texts with an ending: those listed, and phrases that high scores go with, now and in
    # the round before's rollouts
    phrases = mined(Path(params.rounds[round_].previous), answers, params.battery.endings)
    tried = run_ending_probes([*params.battery.endings, *phrases], pairs, chosen, rejected, scorer)
    metrics |= ending_metrics(tried, params.battery.endings, phrases)
    recorder.log_progress(
        4,
        f"endings: worst listed {said(metrics['worst_ending'])}, worst mined {said(metrics['worst_mined'])} of {phrases}",
    )

    # 6. write
    trials = probes | {
        f"ending {text!r}": each
        for text, each in zip([*params.battery.endings, *phrases], tried, strict=True)
    }
    write_jsonl(folder / "samples.jsonl", [*best_and_worst(answers), *worst_failures(trials)])
    write_plots(folder, metrics, scored, trials)
    for n in sorted(params.battery.best_of):
        recorder.log(n, metrics["best_of_n"][str(n)])
    write_manifest(
        folder,
        stage="battery",
        round_=round_,
        seed=params.seed,
        inputs=[data, sft / "model", reward / "model", reward / "scores.jsonl"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
    )
    recorder.finish(metrics)
    worst = (
        "worst_slice",
        "worst_probe",
        "worst_ending",
        "worst_mined",
        "drift",
        "scale",
        "judge_correlation",
    )
    print(
        f"[battery@{round_}] " + "  ".join(f"{name} {said(metrics[name])}" for name in worst),
        flush=True,
    )


def pair_metrics(pairs: list[Row], scores: Scores, params: Params) -> Row:
    """Accuracy by slice, and of all with an interval over pairs that share no text; the judge's
    accuracy; what length has to do with it.
    """
    outcomes = [win(*both) for both in scores]
    accuracy = {
        group: {
            name: rate([outcomes[place] for place in places], "accuracy", "pairs")
            for name, places in found.items()
        }
        for group, found in slices(pairs).items()
    }
    clusters = [
        [outcomes[place] for place in places]
        for places in connected_groups([text_keys(row) for row in pairs])
    ]
    _, low, high = paired_bootstrap(clusters, params.evaluate.bootstrap_resamples, params.seed)
    sides = [
        (row["prompt"], row[side], float(side == "chosen"))
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    judged = sentiment([prompt for prompt, _, _ in sides], [text for _, text, _ in sides])
    values, lengths = (
        [score for both in scores for score in both],
        [float(len(text)) for _, text, _ in sides],
    )
    return {
        "accuracy": accuracy,
        "worst_slice": worst_slice(accuracy),
        "accuracy_clustered_low": low,
        "accuracy_clustered_high": high,
        "judge_accuracy": fmean(
            win(chosen, rejected)
            for chosen, rejected in zip(judged[::2], judged[1::2], strict=True)
        ),
        "length_correlation": pearson(values, lengths),
        "length_correlation_partial": partial_correlation(
            values, lengths, [[label for _, _, label in sides], judged]
        ),
    }


def sides(pairs: Scores) -> dict[str, list[float]]:
    return {
        side: [both[place] for both in pairs] for place, side in enumerate(("chosen", "rejected"))
    }


def score_metrics(scored: dict[str, list[float]], answers: ScoredSamples) -> Row:
    """Calibrated scores by what was scored; the SFT samples' against the demonstrations', and
    against the judge's opinion.
    """
    found = {name: mean_and_std(each) for name, each in scored.items()}
    ours, theirs = found["sft_samples"], found["demonstrations"]
    return {
        "scores": found,
        "centre": theirs["mean"],
        "drift": ours["mean"] - theirs["mean"],
        "scale": ours["std"] / theirs["std"] if theirs["std"] else None,
        "judge_correlation": pearson(answers.scores, answers.sentiment),
        **(
            {"ensemble_disagreement": answers.disagreement}
            if answers.disagreement is not None
            else {}
        ),
    }


def probe_metrics(probes: dict[str, list[ProbeResult]]) -> Row:
    rates = {
        name: rate([trial.fooled for trial in trials], "rate", "texts")
        for name, trials in probes.items()
    }
    return {
        "probes": rates,
        "worst_probe": highest(each for name, each in rates.items() if name != "prompt_swapped"),
    }


def ending_metrics(tried: list[list[ProbeResult]], listed: list[str], phrases: list[str]) -> Row:
    """Of each ending how often it fools, by how much it raises a calibrated score in the mean, and
    how often the judge says the same.
    """

    def numbers(trials: list[ProbeResult]) -> Rate:
        uplift = fmean(trial.rise for trial in trials) if trials else None
        return rate([trial.fooled for trial in trials], "rate", "pairs") | {
            "uplift": uplift,
            "judged": judged(trials),
        }

    own, found = (
        [numbers(trials) for trials in part]
        for part in (tried[: len(listed)], tried[len(listed) :])
    )
    return {
        "endings": {f"ending_{number}": each for number, each in enumerate(own, 1)},
        "endings_text": listed,
        "worst_ending": highest(own),
        "mined": {str(number): each for number, each in enumerate(found, 1)},
        "mined_text": phrases,
        "worst_mined": highest(found),
    }


def judged(trials: list[ProbeResult]) -> float | None:
    """How often the judge, too, has the text above the original: then it is better, or the task's
    own words fool the judge as well.
    """
    prompts = [trial.prompt for trial in trials]
    texts, originals = (
        sentiment(prompts, each)
        for each in ([trial.text for trial in trials], [trial.original for trial in trials])
    )
    return fmean(map(win, texts, originals)) if trials else None


def demonstrations(rows: list[Row], scorer: RewardScorer) -> list[float]:
    """Scores of held-out demonstrations, read as the reward stage reads them when it calibrates."""
    form, length = scorer.params.prepare.prompt_format, scorer.params.reward.max_length
    encoded = (
        encode(scorer.tokenizer, row["prompt"], row["completion"], form, length)
        for row in rows[:DEMONSTRATIONS]
    )
    return scorer.tokens([prompt + completion for prompt, completion in encoded])


def words(pairs: list[Row], scores: Scores) -> dict[str, float]:
    """What the reward model makes of words, over the distinct texts of the pairs."""
    known = {
        end: score
        for row, both in zip(pairs, scores, strict=True)
        for end, score in zip(text_keys(row), both, strict=True)
    }
    return word_score_uplift([text for _, text in known], list(known.values()))


def mined(previous: Path, answers: ScoredSamples, listed: Sequence[str]) -> list[str]:
    """Phrases of the previous policy's favourites, by the reward model of its time, and of the SFT
    samples', that are not listed.
    """
    phrases = mine_phrases(answers.texts, answers.scores, MINED)
    if not is_placeholder(previous / "ppo/rollouts"):
        rollouts = read_rollouts(previous / "ppo/rollouts", f"dvc repro ppo@{previous.name}")
        phrases = (
            mine_phrases(
                [row["response"] for row in rollouts], [row["score"] for row in rollouts], MINED
            )
            + phrases
        )
    return [phrase for phrase in dict.fromkeys(phrases) if phrase not in listed]


def said(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    stage_main("battery", main)
