"""Reward model: learn human preferences from the SFT model, and say how far it can be trusted."""

import csv
import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import ASSETS, read_jsonl, stage_dir, work_dir, write_jsonl, write_text
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row, TokenIds
from stages.lib.data.prompts import check_template, encode, template_hash
from stages.lib.data.splits import prompt_key
from stages.lib.lm.loading import (
    load_sequence_classifier,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
    training_model_params,
)
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.lib.lm.saving import merge_adapter, save_model
from stages.lib.lm.scoring import reward_scores
from stages.lib.metrics.preference_baselines import longest_wins_accuracy, tfidf_accuracy
from stages.lib.metrics.stats import calibration, wilson_interval
from stages.lib.training.trl_setup import initial_checkpoint
from stages.reward.fit import fit, training_pairs
from stages.reward.hard_negatives import hard_negatives
from stages.reward.saving import check_reloaded, reload_difference, save_ensemble, set_calibration

CALIBRATION_ROWS = 256
RELOAD_ROWS = 32


def main(params: Params, round_: str) -> None:
    # 1. data: pairs as tokens; every text ends with EOS, where the score is read
    setup_torch(params)
    folder, data = stage_dir(round_, "reward"), stage_dir(round_, "prepare") / "data"
    recorder = MetricLogger("reward", round_)
    made_by = f"dvc repro prepare@{round_}"
    tokenizer = load_tokenizer(ASSETS / "model")
    check_template(
        stage_dir(round_, "sft") / "manifest.json", tokenizer, params.prepare.prompt_format
    )
    labelled = stage_dir(round_, "annotate") / "data/pairs_train.jsonl"
    train, held_out = (
        read_jsonl(labelled, f"dvc repro annotate@{round_}"),
        read_jsonl(data / "pairs_eval.jsonl", made_by),
    )
    demonstrations = read_jsonl(data / "sft_train.jsonl", made_by)[:CALIBRATION_ROWS]

    ids = partial(tokens, tokenizer, params)
    chosen, rejected = ids(held_out, "chosen"), ids(held_out, "rejected")

    # 2. pairs for a judge of evaluate, if there is to be one, are kept apart
    train, apart = split_judge_pairs(train, params.reward.judge_share, params.seed)

    def trained_on(rows: list[Row], started_from: Path, continues: bool, seed: int) -> Any:
        """Merged, and centred on the SFT demonstrations."""
        pairs = training_pairs(rows, ids(rows, "chosen"), ids(rows, "rejected"))
        torch.manual_seed(seed)
        model = load_sequence_classifier(
            started_from, training_model_params(params.model, params.reward.lora)
        )
        member = merge_adapter(
            fit(model, tokenizer, pairs, params, seed, recorder, continues),
            resolve_dtype(params.model.dtype),
        )
        return set_calibration(member, reward_scores(member, ids(demonstrations, "completion")))

    # 3. train the judge and the members of the ensemble, of which there is usually one, from SFT's
    # model or from those of the round before
    previous, sft = (
        Path(params.rounds[round_].previous) / "reward",
        stage_dir(round_, "sft") / "model",
    )
    shutil.rmtree(folder / "judge", ignore_errors=True)
    if apart:
        judge = trained_on(
            apart + make_hard_negatives(apart, params),
            *initial_checkpoint(params.reward, previous / "judge", sft),
            params.seed,
        )
        save_model(judge, tokenizer, folder / "judge")
    else:
        write_text(folder / "judge/EMPTY", "reward.judge_share is 0: there is no judge apart.\n")
    start, continues = initial_checkpoint(params.reward, previous / "model", sft)
    more = make_hard_negatives(train, params)
    seeds = range(params.seed, params.seed + params.reward.ensemble)
    ensemble = [trained_on(train + more, start, continues, seed) for seed in seeds]

    # 4. save, merged
    merged = save_ensemble(ensemble, tokenizer, params.reward.ensemble_reduce, folder / "model")

    # 5. a fresh process must give the saved model the same scores, of the same batch: in bfloat16
    # another one rounds otherwise
    some = chosen[:RELOAD_ROWS]
    difference = reload_difference(
        folder / "model", some, reward_scores(merged, some), work_dir(round_, "reward")
    )
    check_reloaded(folder / "model", difference)

    # 6. held-out accuracy, margin, calibration, against the baselines that any reward model must
    # beat
    score_chosen, score_rejected = reward_scores(merged, chosen), reward_scores(merged, rejected)
    write_jsonl(folder / "scores.jsonl", score_rows(held_out, merged, score_chosen, score_rejected))
    measured = held_out_metrics(score_chosen - score_rejected, folder)
    write_manifest(
        folder,
        stage="reward",
        round_=round_,
        seed=params.seed,
        inputs=[labelled, data / "pairs_eval.jsonl"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        started_from=str(start),
        calibration={"mean": merged.config.mean, "std": merged.config.std},
    )
    recorder.finish(
        measured
        | {
            "train_pairs": len(train),
            "hard_negatives": len(more),
            "judge_pairs": len(apart),
            "baseline_longest": longest_wins_accuracy(held_out),
            "baseline_tfidf": tfidf_accuracy(train, held_out, params.seed),
            "score_mean": merged.config.mean,
            "score_std": merged.config.std,
            "reload_max_difference": difference,
            "loss": recorder.steps[-1]["loss"],
        }
    )
    print(
        f"[reward@{round_}] held-out accuracy {measured['accuracy']:.3f} [{measured['accuracy_low']:.3f}, {measured['accuracy_high']:.3f}] "
        f"over {measured['pairs']} pairs",
        flush=True,
    )


def tokens(
    tokenizer: PreTrainedTokenizerBase, params: Params, rows: list[Row], side: str
) -> list[TokenIds]:
    """Whole texts, prompt and response, which ends with EOS."""
    pairs = (
        encode(
            tokenizer, r["prompt"], r[side], params.prepare.prompt_format, params.reward.max_length
        )
        for r in rows
    )
    return [prompt + response for prompt, response in pairs]


def score_rows(pairs: list[Row], model: Any, chosen: Tensor, rejected: Tensor) -> Iterator[Row]:
    """Calibrated scores of each pair, of (B,) raw ones."""
    for row, good, bad in zip(
        pairs,
        calibrate_scores(chosen, model).tolist(),
        calibrate_scores(rejected, model).tolist(),
        strict=True,
    ):
        yield {"id": row["id"], "chosen": round(good, 4), "rejected": round(bad, 4)}


def split_judge_pairs(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(pairs to train on, pairs of the judge): by prompt, each by a hash of its own, so that later
    rounds' rows change no side.

    Replayed rows mend the reward model: they are never the judge's.
    """

    def is_apart(row: Row) -> bool:
        digest = hashlib.sha256(f"{seed} {prompt_key(row['prompt'])}".encode()).digest()
        return "badcase" not in row and int.from_bytes(digest[:8], "big") < share * 2**64

    return [row for row in rows if not is_apart(row)], [row for row in rows if is_apart(row)]


def make_hard_negatives(rows: list[Row], params: Params) -> list[Row]:
    return hard_negatives(
        [row for row in rows if "badcase" not in row], params.reward.hard_negatives, params.seed
    )


def held_out_metrics(margins: Tensor, folder: Path) -> dict[str, float]:
    """Accuracy with its interval, mean margin and calibration error of (N,) raw margins chosen -
    rejected; bins to calibration.csv.
    """
    correct, total = int((margins > 0).sum()), len(margins)
    low, high = wilson_interval(correct, total)
    ece, bins = calibration(margins.tolist())
    with (folder / "calibration.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["predicted", "observed", "count"])
        table.writerows(bins)
    return {
        "accuracy": correct / total,
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float(margins.mean()),
        "ece": ece,
        "pairs": total,
    }


if __name__ == "__main__":
    stage_main("reward", main)
