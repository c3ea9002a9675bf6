"""Reward model: learn human preferences from the SFT model, and say how far it can be trusted."""

import csv
import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from stages.lib.core.errors import RondoError
from stages.lib.core.files import (
    ASSETS,
    Recorder,
    Row,
    read_jsonl,
    stage_dir,
    work_dir,
    write_json,
    write_jsonl,
    write_manifest,
    write_text,
)
from stages.lib.core.fresh_process import run_fresh
from stages.lib.core.params import Params, Reduce
from stages.lib.core.stage import run_stage
from stages.lib.data.prompts import check_template, encode, template_hash
from stages.lib.data.splits import prompt_key
from stages.lib.lm.generation import reward_scores
from stages.lib.lm.loading import (
    MEMBERS,
    calibrated,
    in_ensemble,
    load_scalar_model,
    load_tokenizer,
    merge_adapter,
    prepare_torch,
    resolve_dtype,
    save_model,
    weights_params,
)
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.packing import Tokens, without_padding
from stages.lib.metrics.preference_baselines import longest_wins_accuracy, tfidf_accuracy
from stages.lib.metrics.stats import calibration, wilson_interval
from stages.lib.training.trl_setup import RecordSteps, starting_model, trainer_arguments
from stages.reward.hard_negatives import hard_negatives

CALIBRATION_ROWS = 256
RELOAD_ROWS, RELOAD_TOLERANCE = 32, 1e-3


def main(params: Params, round_: str) -> None:
    # 1. data: pairs as tokens; every text ends with EOS, where the score is read
    prepare_torch(params)
    folder, data = stage_dir(round_, "reward"), stage_dir(round_, "prepare") / "data"
    recorder = Recorder("reward", round_)
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
    train, apart = kept_apart(train, params.reward.judge_share, params.seed)

    def trained_on(rows: list[Row], started_from: Path, continues: bool, seed: int) -> Any:
        """Merged, and centred on the SFT demonstrations."""
        pairs = training_pairs(rows, ids(rows, "chosen"), ids(rows, "rejected"))
        torch.manual_seed(seed)
        model = load_scalar_model(started_from, weights_params(params.model, params.reward.lora))
        member = merge_adapter(
            fit(model, tokenizer, pairs, params, seed, recorder, continues),
            resolve_dtype(params.model.dtype),
        )
        return centred(member, reward_scores(member, ids(demonstrations, "completion")))

    # 3. train the judge and the members of the ensemble, of which there is usually one, from SFT's
    # model or from those of the round before
    previous, sft = (
        Path(params.rounds[round_].previous) / "reward",
        stage_dir(round_, "sft") / "model",
    )
    shutil.rmtree(folder / "judge", ignore_errors=True)
    if apart:
        judge = trained_on(
            apart + harder(apart, params),
            *starting_model(params.reward, previous / "judge", sft),
            params.seed,
        )
        save_model(judge, tokenizer, folder / "judge")
    else:
        write_text(folder / "judge/EMPTY", "reward.judge_share is 0: there is no judge apart.\n")
    start, continues = starting_model(params.reward, previous / "model", sft)
    more = harder(train, params)
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
    measured = quality(score_chosen - score_rejected, folder)
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
) -> list[Tokens]:
    """Whole texts, prompt and response, which ends with EOS."""
    pairs = (
        encode(
            tokenizer, r["prompt"], r[side], params.prepare.prompt_format, params.reward.max_length
        )
        for r in rows
    )
    return [prompt + response for prompt, response in pairs]


def centred(model: Any, scores: Tensor) -> Any:
    """The model, which will be read in terms of these raw scores' mean and standard deviation."""
    model.config.mean, model.config.std = float(scores.mean()), float(scores.std())
    return model


def score_rows(pairs: list[Row], model: Any, chosen: Tensor, rejected: Tensor) -> Iterator[Row]:
    """Calibrated scores of each pair, of (B,) raw ones."""
    for row, good, bad in zip(
        pairs, calibrated(chosen, model).tolist(), calibrated(rejected, model).tolist(), strict=True
    ):
        yield {"id": row["id"], "chosen": round(good, 4), "rejected": round(bad, 4)}


def check_reloaded(model: Path, difference: float) -> None:
    """
    Raises:
        RondoError: the saved model is not the one that was trained.
    """
    if not difference <= RELOAD_TOLERANCE:
        raise RondoError(
            f"{model}: reloaded in a fresh process, scores differ by {difference:.4g} (at most {RELOAD_TOLERANCE}); do not use it"
        )


def kept_apart(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(pairs to train on, pairs of the judge): by prompt, each by a hash of its own, so that later
    rounds' rows change no side.

    Replayed rows mend the reward model: they are never the judge's.
    """

    def is_apart(row: Row) -> bool:
        digest = hashlib.sha256(f"{seed} {prompt_key(row['prompt'])}".encode()).digest()
        return "badcase" not in row and int.from_bytes(digest[:8], "big") < share * 2**64

    return [row for row in rows if not is_apart(row)], [row for row in rows if is_apart(row)]


def harder(rows: list[Row], params: Params) -> list[Row]:
    return hard_negatives(
        [row for row in rows if "badcase" not in row], params.reward.hard_negatives, params.seed
    )


def quality(margins: Tensor, folder: Path) -> dict[str, float]:
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


def training_pairs(rows: list[Row], chosen: list[Tokens], rejected: list[Tokens]) -> list[Row]:
    """TRL's columns. Where some rows have a margin all get one: 0, any lead will do, for those
    without (as replayed ones are).
    """
    pairs = [
        {"chosen_ids": c, "rejected_ids": r, "length": max(len(c), len(r))}
        for c, r in zip(chosen, rejected, strict=True)
    ]
    if not any("margin" in row for row in rows):
        return pairs
    return [
        pair | {"margin": row.get("margin", 0.0)} for pair, row in zip(pairs, rows, strict=True)
    ]


def fit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Row],
    params: Params,
    seed: int,
    recorder: Recorder,
    continues: bool,
) -> Any:
    """Bradley-Terry loss by TRL; returns the model (a PeftModel unless lora.r is 0)."""
    model.score.float()  # a bfloat16 head would not move by steps of 1e-4
    model = add_adapters(model, params.reward.lora, "SEQ_CLS")
    arguments = trainer_arguments(
        params.reward, params.model, seed, work_dir(recorder.round, "reward"), continues
    )
    names = {
        name: name
        for name in ("loss", "accuracy", "margin", "grad_norm", "learning_rate", "mean_reward")
    }
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **arguments,
            center_rewards_coefficient=params.reward.center_rewards_coefficient,
            # pairs of like length make a batch, by their column `length`
            remove_unused_columns=False,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        callbacks=[RecordSteps(recorder, names, ["loss", "accuracy"])],
    )
    trainer.remove_callback(PrinterCallback)
    with without_padding(model):
        trainer.train()
    return trainer.model.eval()


def save_ensemble(
    ensemble: list[Any], tokenizer: PreTrainedTokenizerBase, reduce: Reduce, folder: Path
) -> Any:
    """The first member in `folder`, the others in a folder within; returns the first, with the
    others.
    """
    first, *others = ensemble
    if others:
        first.config.ensemble_reduce = reduce.value
    save_model(first, tokenizer, folder)
    shutil.rmtree(folder / MEMBERS, ignore_errors=True)
    for number, member in enumerate(others, 1):
        save_model(member, tokenizer, folder / MEMBERS / str(number))
    return in_ensemble(first, others)


def reload_difference(model: Path, sequences: list[Tokens], expected: Tensor, work: Path) -> float:
    """Largest difference between `expected` scores and those of the saved model in a process of its
    own.
    """
    write_json(work / "reload.json", sequences)
    scores = run_fresh(
        "stages.reward.rescore", model, work / "reload.json", failing=f"{model} cannot be reloaded"
    )
    return float((torch.tensor(scores) - expected).abs().max())


if __name__ == "__main__":
    run_stage("reward", main)
