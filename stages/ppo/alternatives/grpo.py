"""GRPO (Shao et al. 2024): rewards standardised among the responses to one prompt; no critic.

The KL (k3) is a term of the loss, multiplied by the probability ratio, because its gradient would
be biased without it (DeepSeek-V3.2, 2025). This is TRL's default.
"""

from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.lib.core.types import TokenIds
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.online import (
    CustomSamplingMixin,
    OnlineCallback,
    build_trainer,
    config_kwargs,
    run,
)
from stages.ppo.alternatives.policy import TrainingContext


class SampledGrpo(CustomSamplingMixin, GRPOTrainer):
    """GRPOTrainer with this project's prompt tokens and sampling."""

    def _generate_single_turn(
        self, prompt_ids: list[TokenIds], *_: Any, **__: Any
    ) -> tuple[list[TokenIds], None]:
        return self.policy_callback.sample(prompt_ids), None


def train(context: TrainingContext) -> PolicyCallback:
    return run(make_trainer(context))


def make_trainer(context: TrainingContext) -> SampledGrpo:
    callback, own = OnlineCallback(context), context.params.grpo
    config = GRPOConfig(
        **config_kwargs(context, callback.steps, own.num_generations, own.beta), loss_type="grpo"
    )
    trainer: SampledGrpo = build_trainer(SampledGrpo, config, context, callback)
    return trainer
