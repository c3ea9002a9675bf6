"""GRPO (Shao et al. 2024): rewards standardised among the responses to a prompt; no critic.

KL (k3) is in the loss, times the ratio, without which its gradient would be biased (DeepSeek-V3.2,
2025); TRL's default.
"""

from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.lib.core.types import Tokens
from stages.ppo.alternatives.callback import Course
from stages.ppo.alternatives.online import OnlineCourse, Sampled, arguments, assemble, run
from stages.ppo.alternatives.policy import Setting


class SampledGrpo(Sampled, GRPOTrainer):
    def _generate_single_turn(
        self, prompt_ids: list[Tokens], *_: Any, **__: Any
    ) -> tuple[list[Tokens], None]:
        return self.course.respond(prompt_ids), None


def train(setting: Setting) -> Course:
    return run(make_trainer(setting))


def make_trainer(setting: Setting) -> SampledGrpo:
    course, own = OnlineCourse(setting), setting.params.grpo
    config = GRPOConfig(
        **arguments(setting, course.steps, own.num_generations, own.beta), loss_type="grpo"
    )
    trainer: SampledGrpo = assemble(SampledGrpo, config, setting, course)
    return trainer
