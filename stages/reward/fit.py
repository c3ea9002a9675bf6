"""Train reward models with TRL's RewardTrainer."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from stages.lib.core.files import work_dir
from stages.lib.core.params import Params
from stages.lib.core.progress import progress
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import PreferencePair
from stages.lib.core.types import TokenIds
from stages.lib.lm.lora import add_adapters
from stages.lib.training.trl_setup import (
    MetricLoggerCallback,
    SharedTraining,
    run_trainer,
    trainer_arguments,
)


class TokenizedPair(TypedDict):
    """TRL's columns. length: tokens of the longer text."""

    chosen_ids: TokenIds
    rejected_ids: TokenIds
    length: int
    margin: NotRequired[float]


class SharedRewardTrainer(SharedTraining, RewardTrainer):
    pass


def training_pairs(
    rows: Sequence[PreferencePair], chosen: list[TokenIds], rejected: list[TokenIds]
) -> list[TokenizedPair]:
    """Pairs for TRL, with a margin if any row has one.

    Rows without a margin then get 0, so that chosen only has to score above rejected (replayed rows
    have none).
    """
    pairs: list[TokenizedPair] = [
        {"chosen_ids": c, "rejected_ids": r, "length": max(len(c), len(r))}
        for c, r in zip(chosen, rejected, strict=True)
    ]
    if not any("margin" in row for row in rows):
        return pairs
    for pair, row in zip(pairs, rows, strict=True):
        pair["margin"] = row.get("margin", 0.0)
    return pairs


def fit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[TokenizedPair],
    params: Params,
    seed: int,
    recorder: MetricLogger,
    continues: bool,
) -> Any:
    """Train with TRL's Bradley-Terry loss; returns the model (a PeftModel unless lora.r is 0)."""
    model.score.float()  # a bfloat16 head would not change by steps of 1e-4
    model = add_adapters(model, params.reward.lora, "SEQ_CLS")
    arguments = trainer_arguments(
        params.reward, params.model, seed, work_dir(recorder.round, "reward"), continues
    )
    columns = ("loss", "accuracy", "margin", "grad_norm", "learning_rate", "mean_reward")
    names = {name: name for name in columns}
    with progress("preparing the training"):
        trainer = SharedRewardTrainer(
            model=model,
            args=RewardConfig(
                **arguments,
                center_rewards_coefficient=params.reward.center_rewards_coefficient,
                # the column `length` groups pairs of similar length into a batch
                remove_unused_columns=False,
            ),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
            callbacks=[MetricLoggerCallback(recorder, names, ["loss", "accuracy"])],
        )
    return run_trainer(trainer)
