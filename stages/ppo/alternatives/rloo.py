"""RLOO (Ahmadian et al. 2024): each response's reward, less KL, against the mean of the others to
its prompt; no critic.
"""

from typing import Any

from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from stages.lib.core.types import Tokens
from stages.ppo.alternatives.callback import Course
from stages.ppo.alternatives.online import OnlineCourse, Sampled, arguments, assemble, run
from stages.ppo.alternatives.policy import Setting


class SampledRloo(Sampled, RLOOTrainer):
    def _generate_single_turn(self, prompt_ids: list[Tokens], *_: Any) -> list[Tokens]:
        return self.course.respond(prompt_ids)


def train(setting: Setting) -> Course:
    return run(make_trainer(setting))


def make_trainer(setting: Setting) -> SampledRloo:
    course, own = OnlineCourse(setting), setting.params.rloo
    config = RLOOConfig(**arguments(setting, course.steps, own.num_generations, own.beta))
    trainer: SampledRloo = assemble(SampledRloo, config, setting, course)
    return trainer
