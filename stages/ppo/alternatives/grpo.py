"""GRPO (Shao et al. 2024): rewards standardised among the responses to a prompt; no critic.

KL (k3) is in the loss, times the ratio, without which its gradient would be biased (DeepSeek-V3.2,
2025); TRL's default.
"""

from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.lib.core.types import TokenIds
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.online import (
    CustomSamplingMixin,
    OnlineCourse,
    build_trainer,
    config_kwargs,
    run,
)
from stages.ppo.alternatives.policy import TrainingContext


class SampledGrpo(CustomSamplingMixin, GRPOTrainer):
    def _generate_single_turn(
        self, prompt_ids: list[TokenIds], *_: Any, **__: Any
    ) -> tuple[list[TokenIds], None]:
        return self.course.respond(prompt_ids), None


def train(setting: TrainingContext) -> PolicyCallback:
    return run(make_trainer(setting))


def make_trainer(setting: TrainingContext) -> SampledGrpo:
    course, own = OnlineCourse(setting), setting.params.grpo
    config = GRPOConfig(
        **config_kwargs(setting, course.steps, own.num_generations, own.beta), loss_type="grpo"
    )
    trainer: SampledGrpo = build_trainer(SampledGrpo, config, setting, course)
    return trainer
