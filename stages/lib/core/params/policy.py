"""What makes the policy, and the keys of each algorithm beside PPO's (docs/algorithms.md); names
are TRL's.
"""

from enum import Enum

from pydantic import Field

from stages.lib.core.params.section import Section

DRAWN = 256  # responses, at most, by which the alternatives to PPO are described before and after


class Algorithm(str, Enum):
    ppo = "ppo"
    dpo = "dpo"
    rloo = "rloo"
    grpo = "grpo"
    best_of_n = "best_of_n"


class OfflineParams(Section):
    """Of a policy that learns from texts that are there before it starts."""

    learning_rate: float = Field(5e-4, gt=0)
    per_device_train_batch_size: int = Field(
        16, ge=1, description="Pairs or texts an optimiser step."
    )
    num_train_epochs: float = Field(1.0, gt=0)


class DpoParams(OfflineParams):
    beta: float = Field(
        0.1,
        gt=0,
        description="How strongly the policy is held to SFT: the higher, the nearer it stays.",
    )


class BestOfNParams(OfflineParams):
    n: int = Field(
        8, ge=2, description="Responses of SFT a prompt; the one with the highest reward is learnt."
    )


class OnlineParams(Section):
    """Of a policy that learns from its own responses; sizes, lengths and learning rate are PPO's."""

    num_generations: int = Field(
        4,
        ge=2,
        description="Responses a prompt, measured against each other; divides ppo.batch_size.",
    )


class RlooParams(OnlineParams):
    beta: float = Field(
        0.11, ge=0, description="KL coefficient: what a nat a sequence takes from its reward."
    )


class GrpoParams(OnlineParams):
    beta: float = Field(
        0.11, ge=0, description="KL coefficient: what a nat a token (k3) adds to the loss."
    )
