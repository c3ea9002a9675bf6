"""RLOO (Ahmadian et al. 2024): the advantage of a response is its reward, less KL, minus the mean
of the other responses to its prompt; no critic.
"""

from typing import Any

from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

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


class SampledRloo(CustomSamplingMixin, RLOOTrainer):
    """RLOOTrainer with this project's prompt tokens and sampling."""

    def _generate_single_turn(self, prompt_ids: list[TokenIds], *_: Any) -> list[TokenIds]:
        return self.policy_callback.sample(prompt_ids)


def train(context: TrainingContext) -> PolicyCallback:
    return run(make_trainer(context))


def make_trainer(context: TrainingContext) -> SampledRloo:
    callback, own = OnlineCallback(context), context.params.rloo
    config = RLOOConfig(**config_kwargs(context, callback.steps, own.num_generations, own.beta))
    trainer: SampledRloo = build_trainer(SampledRloo, config, context, callback)
    return trainer
