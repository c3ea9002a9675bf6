"""Sections of params.yaml for SFT and the reward model."""

from pydantic import Field

from stages.lib.core.params.shared import LoraParams, Reduce, TrainParams


class SftParams(TrainParams):
    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(16, ge=1)
    num_train_epochs: float = Field(0.7, gt=0)
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    continue_epochs: float | None = Field(
        0.25,
        gt=0,
        description="Epochs when continuing from the round before; null: num_train_epochs.",
    )
    samples_per_prompt: int = Field(
        4,
        ge=1,
        description="Responses of base and SFT to each frozen prompt, side by side for the judge.",
    )


class RewardParams(TrainParams):
    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(16, ge=2)
    num_train_epochs: float = Field(1.0, gt=0)
    continue_epochs: float | None = Field(
        0.5,
        gt=0,
        description="Epochs when continuing from the round before; null: num_train_epochs.",
    )
    lora: LoraParams = Field(default_factory=lambda: LoraParams(top_layers=16))
    hard_negatives: float = Field(
        0.55,
        ge=0,
        le=1,
        description="Pairs to add, as a share of the pairs: against broken texts, and against bad ones with a good end.",
    )
    judge_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the pairs' prompts that a second reward model learns from alone: `apart` in evaluate.judges.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        le=8,
        description="Reward models that are trained, each with a seed of its own; all score together (Coste et al. 2024).",
    )
    ensemble_reduce: Reduce = Field(
        Reduce.mean,
        description="`mean` of the members' calibrated scores, or the worst case: `min`.",
    )
    center_rewards_coefficient: float | None = Field(
        0.01, ge=0, description="Weight of the squared mean reward of a pair (TRL)."
    )
