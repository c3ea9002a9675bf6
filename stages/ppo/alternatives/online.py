"""What RLOO and GRPO share: TRL's trainers, on this project's prompts, samples and rewards."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from stages.lib.core.params.shared import TrainParams
from stages.lib.core.types import Row, TokenIds
from stages.lib.data.prompts import render_prompt
from stages.lib.lm.lora import lora_config
from stages.lib.lm.packing import padding_free
from stages.lib.training.trl_setup import trainer_arguments
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.policy import TrainingContext
from stages.ppo.common.episodes import planned_updates
from stages.ppo.common.outputs import describe_rows

NAMES = {name: name for name in ("loss", "grad_norm", "learning_rate", "entropy")} | {
    "clip_ratio/region_mean": "clip_fraction"
}


class OnlineCourse(PolicyCallback):
    """Samples for the trainer and rewards them; an update is what one batch of samples teaches, as
    in PPO.
    """

    def __init__(self, setting: TrainingContext) -> None:
        ppo = setting.params.ppo
        super().__init__(
            setting, NAMES, steps=ppo.num_ppo_epochs * ppo.batch_size // ppo.mini_batch_size
        )
        self.generator = torch.Generator().manual_seed(setting.params.seed)
        self.texts = [
            render_prompt(setting.tokenizer, row["prompt"], setting.params.prepare.prompt_format)
            for row, _ in setting.prompts
        ]
        self.tokens = {
            text: tokens for text, (_, tokens) in zip(self.texts, setting.prompts, strict=True)
        }
        self.rows: list[Row] = []  # of the update at hand

    def tokenise(self, prompts: Sequence[str]) -> list[TokenIds]:
        return [self.tokens[prompt] for prompt in prompts]

    def respond(self, prompt_ids: list[TokenIds]) -> list[TokenIds]:
        return self.pupil.sample(prompt_ids, self.ppo, self.generator)

    def reward(self, completion_ids: list[TokenIds], place: list[int], **_: Any) -> list[float]:
        """TRL's reward function: what PPO is rewarded by. place: of each prompt among the
        setting's.
        """
        self.rows, rewards = self.pupil.score(
            self.updates + 1, [self.setting.prompts[i] for i in place], completion_ids
        )
        self.rollouts.append(self.rows)
        return rewards

    def describe(self) -> dict[str, float]:
        rows, rewards = self.rows, [row["reward"] for row in self.rows]
        return describe_rows(rows) | {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}


class CustomSamplingMixin:
    """Of a trainer of TRL's: prompts have the tokens, and responses are sampled, as everywhere in
    this project.
    """

    course: OnlineCourse

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[TokenIds], None, dict[str, Any]]:
        return self.course.tokenise(prompts), None, {}


def config_kwargs(
    setting: TrainingContext, steps: int, num_generations: int, beta: float
) -> dict[str, Any]:
    """Keyword arguments for RLOOConfig and GRPOConfig: as many samples an update, and steps on
    them, as PPO has.
    """
    params, ppo = setting.params, setting.params.ppo
    sizes = TrainParams(
        learning_rate=ppo.learning_rate,
        per_device_train_batch_size=ppo.micro_batch_size,
        gradient_accumulation_steps=ppo.mini_batch_size // ppo.micro_batch_size,
        max_steps=planned_updates(ppo) * steps,
        lora=ppo.lora,
    )
    shared = trainer_arguments(sizes, params.model, params.seed, setting.work, continues=False)
    for name in ("max_length", "train_sampling_strategy"):  # of trainers on texts
        del shared[name]
    return shared | {
        "warmup_steps": ppo.warmup_updates * steps,
        "max_grad_norm": ppo.max_grad_norm,
        "generation_batch_size": ppo.batch_size,
        "num_iterations": ppo.num_ppo_epochs,
        "epsilon": ppo.cliprange,
        "temperature": ppo.temperature,
        "max_completion_length": ppo.response_length,
        "disable_dropout": True,
        "num_generations": num_generations,
        "beta": beta,
    }


def build_trainer(kind: Any, config: Any, setting: TrainingContext, course: OnlineCourse) -> Any:
    """A `kind` of TRL's trainers, that has `course`."""
    lora = setting.params.ppo.lora
    trainer = kind(
        model=setting.sft,
        reward_funcs=course.reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": text, "place": place} for place, text in enumerate(course.texts)]
        ),
        processing_class=setting.tokenizer,
        callbacks=[course],
        peft_config=lora_config(lora, "CAUSAL_LM", setting.sft)
        if lora.r
        else None,  # of a PeftModel it would keep a copy as reference
    )
    trainer.remove_callback(PrinterCallback)
    trainer.course = course
    return trainer


def run(trainer: Any) -> PolicyCallback:
    course: OnlineCourse = trainer.course
    course.begin(trainer.model)
    with padding_free(trainer.model):
        trainer.train()
    return course
