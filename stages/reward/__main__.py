"""The reward stage: train the reward model on preference pairs, starting from the SFT model.

A share of the pairs (`reward.judge_share`) trains a second reward model instead, a judge of the
evaluate stage that PPO never optimises. Without pairs there is no reward model.

With `reward.model` none is trained: the stage calibrates and measures a model that others made.

Inputs: rounds/<round>/{prepare,annotate}/data, rounds/<round>/sft, assets/model; with
`reward.init_from: previous` also the previous round's reward models.
Outputs in rounds/<round>/reward: model (merged, calibrated), judge (or a placeholder), scores.jsonl
(held-out pairs), calibration.csv, metrics.jsonl (per step), metrics.json, manifest.json.
Run: `python -m stages.reward --round r0`.
"""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, stage_dir, work_dir, write_csv, write_jsonl, write_text
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm, Critic, Engine
from stages.lib.core.progress import print_line
from stages.lib.core.recorder import NOT_MEASURED, MetricLogger, write_manifest
from stages.lib.core.rows import SIDES, Demonstration, PreferencePair, RewardScores, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.core.types import TokenIds
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.lengths import (
    TokenizedRows,
    check_lengths,
    report_overlong,
    tokenize_fitting,
)
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.data.splits import calibration_demonstrations, prompt_key
from stages.lib.lm import world
from stages.lib.lm.loading import (
    MEMBERS,
    load_sequence_classifier,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
    training_model_params,
)
from stages.lib.lm.lora import is_adapter
from stages.lib.lm.saving import merge_adapter, save_model
from stages.lib.lm.scoring import (
    calibrate_scores,
    load_reading_tokenizer,
    reads_alike,
    reward_scores,
    set_calibration,
)
from stages.lib.metrics.preference_baselines import more_wins_accuracy, word_model
from stages.lib.metrics.stats import calibration, interval_names, wilson_interval
from stages.lib.training.trl_setup import initial_checkpoint
from stages.reward.fit import fit, training_pairs
from stages.reward.hard_negatives import hard_negatives
from stages.reward.saving import (
    check_reloaded,
    join_ensemble,
    reload_difference,
    save_ensemble,
)

RELOAD_ROWS = 32
# Added to the seed. A judge that starts with the reward model's random head prefers what the reward
# model prefers, whatever their pairs are.
JUDGE_SEED = 1000
CALIBRATION_COLUMNS = ("predicted", "observed", "count")


@dataclass(frozen=True)
class RewardModelTrainer:
    """Trains reward models that differ in their pairs, start and seed: the judge and the ensemble.

    demonstrations: those whose scores get mean 0 and standard deviation 1.
    """

    params: Params
    tokenizer: PreTrainedTokenizerBase
    demonstrations: list[Demonstration]
    recorder: MetricLogger

    def tokenize(self, pairs: list[PreferencePair]) -> TokenizedRows[PreferencePair]:
        """The pairs that fit into reward.max_length, with their tokens."""
        return tokenize_fitting(self.tokenizer, pairs, SIDES, self.params, "reward")

    def read(self, stage: str, name: str) -> TokenizedRows[PreferencePair]:
        """The pairs of a file of another stage; prints how many are too long."""
        label, round_ = self.recorder.label, self.recorder.round
        path = stage_dir(round_, stage) / f"data/{name}.jsonl"
        rows = read_rows(PreferencePair, path)
        tokenized = self.tokenize(rows)
        report_overlong(label, tokenized.overlong, len(rows), "reward", self.params)
        return tokenized

    def train(
        self,
        rows: list[PreferencePair],
        start: Path,
        continues: bool,
        seed: int,
        role: str = "the reward model",
    ) -> Any:
        """Train one reward model on the pairs `rows`; returns it merged and calibrated.

        role: of the model, for the log.
        """
        params = self.params
        tokenized = self.tokenize(rows)
        print_line(f"[{self.recorder.label}] training {role} on {len(tokenized.rows)} pairs")
        pairs = training_pairs(tokenized.rows, *map(tokenized.texts, SIDES))
        torch.manual_seed(seed)  # of the new score head and the adapters
        model = load_sequence_classifier(
            start, training_model_params(params.model, params.reward.lora)
        )
        model = fit(model, self.tokenizer, pairs, params, seed, self.recorder, continues)
        model = merge_adapter(model, resolve_dtype(params.model.dtype))
        return set_calibration(model, reward_scores(model, self.demonstration_ids()))

    def take(self, folder: Path) -> Any:
        """A reward model that others made; returns it calibrated."""
        model = load_sequence_classifier(folder, self.params.model, new_head=False)
        return set_calibration(
            model,
            reward_scores(model, self.demonstration_ids()),
            f"reward.model {folder} cannot be calibrated",
            "name another model",
        )

    def demonstration_ids(self) -> list[TokenIds]:
        """The tokens of the demonstrations that fit into reward.max_length."""
        fitting = tokenize_fitting(
            self.tokenizer, self.demonstrations, ["completion"], self.params, "reward"
        )
        return fitting.texts("completion")


def main(params: Params, round_: str) -> None:
    """Train, calibrate and measure the reward model of a round."""
    # 1. data: pairs as tokens; every text ends with EOS, where the score is read
    setup_torch(params)
    check_lengths(params)
    folder, sft = stage_dir(round_, "reward"), stage_dir(round_, "sft")
    recorder = MetricLogger("reward", round_, writes=world.is_main())
    tokenizer = load_tokenizer(ASSETS / "model")
    check_template(sft / "manifest.json", tokenizer, params.prepare.prompt_format)
    trainer = reader = RewardModelTrainer(
        params, tokenizer, calibration_demonstrations(round_, params.seed), recorder
    )
    labelled = trainer.read("annotate", "pairs_train")
    if not labelled.rows:
        return write_no_model(params, recorder, tokenizer)
    if given := params.reward.model:
        check_unchanged("reward_model", params)
        given_folder = model_folder(given, "reward.model")
        reader = replace(trainer, tokenizer=tokenizer_for(given_folder, tokenizer, params))
    held_out = reader.read("prepare", "pairs_eval")
    chosen, rejected = map(held_out.texts, SIDES)

    # 2. split off the pairs of the judge, if there is one: no prompt trains both models
    share = params.reward.judge_share
    train_rows, judge_rows = split_judge_pairs(labelled.rows, share, params.seed)

    # 3. train the judge and the members of the ensemble (usually one), from the SFT model or from
    # the previous round's models, unless reward.model names one; save them merged
    previous = Path(params.rounds[round_].previous) / "reward"
    world.in_main(lambda: shutil.rmtree(folder / "judge", ignore_errors=True))
    if judge_rows:
        train_judge(trainer, judge_rows, previous / "judge", sft / "model", folder / "judge")
    elif world.is_main():
        write_text(folder / "judge/EMPTY", "reward.judge_share is 0: there is no judge apart.\n")
    trained_on = [] if given else train_rows + make_hard_negatives(train_rows, params)
    start, continues = initial_checkpoint(params.reward, previous / "model", sft / "model")
    if given:
        start, members = Path(given), [reader.take(given_folder)]
    else:
        seeds = range(params.seed, params.seed + params.reward.ensemble)
        members = [trainer.train(trained_on, start, continues, seed) for seed in seeds]
    model = join_ensemble(members, params.reward.ensemble_reduce, reader.demonstration_ids())
    world.in_main(lambda: save_ensemble(model, reader.tokenizer, folder / "model"))

    # 4. check that a fresh process gets the same scores from the saved model, for the same batch
    reload_ids = chosen[:RELOAD_ROWS]
    expected, work = reward_scores(model, reload_ids), work_dir(round_, "reward")
    difference = world.in_main(
        lambda: reload_difference(folder / "model", reload_ids, expected, work)
    )
    check_reloaded(folder / "model", difference)

    # 5. measure on held-out pairs, beside the baselines that a reward model must beat
    scores = reward_scores(model, chosen), reward_scores(model, rejected)
    accuracy_metrics, calibration_bins = held_out_metrics(scores[0] - scores[1])
    calibrated_by = {"mean": model.config.mean, "std": model.config.std}
    metrics = {
        **accuracy_metrics,
        "train_pairs": 0 if given else len(train_rows),
        "hard_negatives": max(len(trained_on) - len(train_rows), 0),
        "judge_pairs": len(judge_rows),
        "overlong": labelled.overlong,
        "overlong_held_out": held_out.overlong,
        "baseline_longest": more_wins_accuracy(held_out.rows, len),
        "baseline_tfidf": word_model(train_rows, held_out.rows, params.seed).accuracy,
        **{f"score_{name}": value for name, value in calibrated_by.items()},
        "reload_max_difference": difference,
        "loss": recorder.steps[-1]["loss"] if recorder.steps else None,
    }

    # 6. write scores, calibration, manifest and metrics
    if not world.is_main():
        return
    write_jsonl(folder / "scores.jsonl", score_rows(held_out.rows, model, *scores))
    write_csv(folder / "calibration.csv", CALIBRATION_COLUMNS, calibration_bins)
    save_manifest(params, round_, tokenizer, started_from=str(start), calibration=calibrated_by)
    recorder.finish(metrics)
    accuracy, low, high = (metrics[name] for name in interval_names("accuracy"))
    interval = f"{accuracy:.3f} [{low:.3f}, {high:.3f}] over {metrics['pairs']} pairs"
    print(f"[reward@{round_}] held-out accuracy {interval}", flush=True)


def tokenizer_for(
    folder: Path, tokenizer: PreTrainedTokenizerBase, params: Params
) -> PreTrainedTokenizerBase:
    """The tokenizer of a reward model that others made: that of assets.model, or its own.

    Raises:
        BadInput: the model is an adapter or an ensemble; or it has its own tokenizer, and a setting
            needs that it reads the policy's tokens.
    """
    if is_adapter(folder):
        raise BadInput(f"reward.model {folder}: an adapter: merge it")
    if (folder / MEMBERS).exists():
        raise BadInput(f"reward.model {folder}: an ensemble: name one member")
    own = load_reading_tokenizer(folder, params.prepare.prompt_format)
    if reads_alike(own, tokenizer):
        return tokenizer
    ppo = params.ppo
    has_critic = params.algorithm is Algorithm.ppo and not ppo.model and ppo.critic is Critic.reward
    needs = {
        "set ppo.critic to policy": has_critic,
        "set ppo.engine to local": ppo.engine is not Engine.local,
        "set ppo.reward_url to null": ppo.reward_url is not None,
    }
    if changes := [change for change, is_needed in needs.items() if is_needed]:
        raise BadInput(
            f"reward.model {folder}: its tokens are not those of assets.model, so it gets texts. "
            f"Next: {', '.join(changes)}"
        )
    return own


def write_no_model(
    params: Params, recorder: MetricLogger, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Without pairs: placeholders for the models, and files without rows."""
    if not world.is_main():
        return
    folder, reason = stage_dir(recorder.round, "reward"), "not trained: there are no pairs"
    for name in ("model", "judge"):
        shutil.rmtree(folder / name, ignore_errors=True)
        write_text(folder / name / "EMPTY", f"{reason}\n")
    write_jsonl(folder / "scores.jsonl", [])
    write_csv(folder / "calibration.csv", CALIBRATION_COLUMNS, [])
    save_manifest(params, recorder.round, tokenizer)
    recorder.finish({NOT_MEASURED: reason, "train_pairs": 0})
    print(f"[{recorder.label}] {reason}", flush=True)


def save_manifest(
    params: Params, round_: str, tokenizer: PreTrainedTokenizerBase, **facts: Any
) -> None:
    prepared, annotated = (stage_dir(round_, name) / "data" for name in ("prepare", "annotate"))
    write_manifest(
        "reward",
        round_,
        seed=params.seed,
        inputs=[annotated / "pairs_train.jsonl", prepared / "pairs_eval.jsonl"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        **facts,
    )


def train_judge(
    trainer: RewardModelTrainer,
    rows: list[PreferencePair],
    previous: Path,
    sft: Path,
    folder: Path,
) -> None:
    """Train the second reward model on its pairs, and save it in `folder`."""
    params = trainer.params
    judge = trainer.train(
        rows + make_hard_negatives(rows, params),
        *initial_checkpoint(params.reward, previous, sft),
        params.seed + JUDGE_SEED,
        "the judge",
    )
    world.in_main(lambda: save_model(judge, trainer.tokenizer, folder))


def score_rows(
    pairs: list[PreferencePair], model: Any, chosen: Tensor, rejected: Tensor
) -> Iterator[RewardScores]:
    """One row per pair with its calibrated scores. chosen, rejected: (B,) raw scores."""
    columns = (calibrate_scores(scores, model).tolist() for scores in (chosen, rejected))
    for row, better, worse in zip(pairs, *columns, strict=True):
        yield {"id": row["id"], "chosen": round(better, 4), "rejected": round(worse, 4)}


def split_judge_pairs(
    rows: list[PreferencePair], share: float, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Split pairs by prompt into (pairs of the reward model, pairs of the judge).

    Each prompt's side depends on its own hash alone, so that rows added in later rounds move no
    other row to the other side. Replayed rows are there to improve the reward model: they are
    never the judge's.
    """

    def is_judge_pair(row: PreferencePair) -> bool:
        digest = hashlib.sha256(f"{seed} {prompt_key(row['prompt'])}".encode()).digest()
        return "badcase" not in row and int.from_bytes(digest[:8], "big") < share * 2**64

    reward_rows = [row for row in rows if not is_judge_pair(row)]
    return reward_rows, [row for row in rows if is_judge_pair(row)]


def make_hard_negatives(rows: list[PreferencePair], params: Params) -> list[PreferencePair]:
    """Hard negatives of the pairs that are not replayed."""
    own_rows = [row for row in rows if "badcase" not in row]
    return hard_negatives(own_rows, params.reward.hard_negatives, params.seed)


def held_out_metrics(
    margins: Tensor,
) -> tuple[dict[str, float], list[tuple[float, float, int]]]:
    """Accuracy with its 95% interval, mean margin and calibration error of held-out pairs.

    Args:
        margins: (N,) raw scores, chosen - rejected.

    Returns:
        The metrics, and the bins of the calibration error: (predicted, observed, count).
    """
    correct, total = int((margins > 0).sum()), len(margins)
    low, high = wilson_interval(correct, total)
    ece, bins = calibration(margins.tolist())
    metrics = {
        "accuracy": correct / total,
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float(margins.mean()),
        "ece": ece,
        "pairs": total,
    }
    return metrics, bins


if __name__ == "__main__":
    stage_main("reward", main)
