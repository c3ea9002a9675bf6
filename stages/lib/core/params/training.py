"""Sections of params.yaml for SFT and the reward model."""

from pydantic import Field

from stages.lib.core.params.shared import InitFrom, LoraParams, PathText, Reduce, TrainParams


class SftParams(TrainParams):
    model: PathText | None = Field(
        None,
        description="Folder or `org/name@COMMIT` of an SFT model to use as it is, or of an adapter "
        "of assets.model; null: train one.",
    )
    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate.")
    per_device_train_batch_size: int = Field(16, ge=1, description="Rows per forward pass.")
    num_train_epochs: float = Field(0.7, gt=0, description="Passes over the training data.")
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    continue_epochs: float | None = Field(
        0.25,
        gt=0,
        description="Epochs if training continues from the round before; null: num_train_epochs.",
    )
    samples_per_prompt: int = Field(
        4,
        ge=1,
        description="Responses of base and SFT per frozen prompt, which the judge compares.",
    )


class RewardParams(TrainParams):
    model: PathText | None = Field(
        None,
        description="Folder or `org/name@COMMIT` of a reward model to use as it is; null: "
        "train one.",
    )
    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate.")
    per_device_train_batch_size: int = Field(16, ge=2, description="Pairs per forward pass.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training data.")
    init_from: InitFrom = Field(
        InitFrom.base,
        description="From the second round on: continue from the `previous` round, or start from "
        "the round's SFT model (`base`).",
    )
    continue_epochs: float | None = Field(
        0.5,
        gt=0,
        description="Epochs if training continues from the round before; null: num_train_epochs.",
    )
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    hard_negatives: float = Field(
        0.55,
        ge=0,
        le=1,
        description="Added pairs, as a share of all pairs: against corrupted texts, and against "
        "bad texts with a good ending.",
    )
    judge_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the pairs' prompts reserved for a second reward model, the judge "
        "`apart` of evaluate.judges.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        le=8,
        description="Reward models to train, each with its own seed; they score together (Coste "
        "et al. 2024).",
    )
    ensemble_reduce: Reduce = Field(
        Reduce.mean,
        description="Calibrated scores of an ensemble: their `mean`, or the worst case `min`.",
    )
    center_rewards_coefficient: float | None = Field(
        0.01, ge=0, description="Weight of the squared mean reward of a pair in the loss (TRL)."
    )
