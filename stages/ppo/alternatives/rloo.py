"""RLOO (Ahmadian et al. 2024): each response's reward, less KL, against the mean of the others to
its prompt; no critic.
"""

from typing import Any

from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

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


class SampledRloo(CustomSamplingMixin, RLOOTrainer):
    def _generate_single_turn(self, prompt_ids: list[TokenIds], *_: Any) -> list[TokenIds]:
        return self.course.respond(prompt_ids)


def train(setting: TrainingContext) -> PolicyCallback:
    return run(make_trainer(setting))


def make_trainer(setting: TrainingContext) -> SampledRloo:
    course, own = OnlineCourse(setting), setting.params.rloo
    config = RLOOConfig(**config_kwargs(setting, course.steps, own.num_generations, own.beta))
    trainer: SampledRloo = build_trainer(SampledRloo, config, setting, course)
    return trainer
