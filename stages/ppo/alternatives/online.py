"""Shared by RLOO and GRPO: TRL's trainers on this project's prompts, samples and rewards."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from datasets import Dataset

from stages.lib.core.params.shared import TrainParams
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.data.prompts import render_prompt
from stages.lib.lm.lora import lora_config
from stages.lib.training.sharing import SharedOnlineTraining
from stages.lib.training.trl_setup import trainer_arguments
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.policy import ScoredRollouts, TrainingContext
from stages.ppo.common.episodes import planned_updates
from stages.ppo.common.outputs import describe_rows

NAMES = {name: name for name in ("loss", "grad_norm", "learning_rate", "entropy")} | {
    "clip_ratio/region_mean": "clip_fraction"
}


class OnlineCallback(PolicyCallback):
    """A PolicyCallback that also samples and rewards responses for the trainer.

    An update is all optimizer steps on one batch of samples, as in PPO.

    Attributes:
        scored: the rollout rows and rewards of the current update.
    """

    sharing = SharedOnlineTraining
    scored: ScoredRollouts

    def __init__(self, context: TrainingContext) -> None:
        ppo = context.params.ppo
        steps = ppo.num_ppo_epochs * ppo.batch_size // ppo.mini_batch_size
        super().__init__(context, NAMES, steps)
        self.generator = torch.Generator().manual_seed(context.params.seed)
        if self.saved:
            self.generator.set_state(self.saved["generator"])
        # TRL's trainers pass prompts as texts; `tokens` maps them to the same tokens as in PPO
        self.texts = [
            render_prompt(context.tokenizer, row["prompt"], context.params.prepare.prompt_format)
            for row, _ in context.prompts
        ]
        self.tokens = {
            text: tokens for text, (_, tokens) in zip(self.texts, context.prompts, strict=True)
        }

    def prompt_tokens(self, prompts: Sequence[str]) -> list[TokenIds]:
        """The tokens of rendered prompts."""
        return [self.tokens[prompt] for prompt in prompts]

    def sample(self, prompt_ids: list[TokenIds]) -> list[TokenIds]:
        """One response per prompt by the current policy."""
        return self.trained_policy.sample(prompt_ids, self.ppo, self.generator)

    def reward(
        self, completion_ids: list[TokenIds], prompt_index: list[int], **_: Any
    ) -> list[float | None]:
        """TRL's reward function: the same rewards as in PPO.

        prompt_index: of each response's prompt in `context.prompts`, a column of the dataset. A
        response with None has the advantage 0, and the others of its prompt are compared without it
        (TRL).
        """
        episodes = [self.context.prompts[index] for index in prompt_index]
        self.scored = self.trained_policy.score(self.updates + 1, episodes, completion_ids)
        self.rollouts.append(self.scored.rows)
        return self.scored.rewards

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass over the complete epochs: TRL's sampler draws each epoch's order after the last."""
        sampler = kwargs["train_dataloader"].batch_sampler.sampler
        for _ in range(int(state.epoch or 0)):
            list(sampler)

    def state(self) -> StateDict:
        return super().state() | {"generator": self.generator.get_state()}

    def describe(self) -> dict[str, float]:
        rows = self.scored.rows
        rewards = [row["reward"] for row in rows]
        metrics = describe_rows(rows, self.selector.first.length) | {
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
        }
        if self.context.rewards.sources:
            metrics["reward_failed_share"] = self.scored.failed_share
        return metrics


class CustomSamplingMixin:
    """Gives one of TRL's trainers this project's prompt tokens; subclasses add the sampling."""

    policy_callback: OnlineCallback

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[TokenIds], None, dict[str, Any]]:
        return self.policy_callback.prompt_tokens(prompts), None, {}


def config_kwargs(
    context: TrainingContext, steps: int, num_generations: int, beta: float
) -> dict[str, Any]:
    """Keyword arguments for RLOOConfig and GRPOConfig, with the batch sizes and steps of PPO.

    Args:
        context: what the training starts from.
        steps: optimizer steps per update.
        num_generations: responses per prompt.
        beta: KL coefficient.
    """
    params, ppo = context.params, context.params.ppo
    train_params = TrainParams(
        learning_rate=ppo.learning_rate,
        per_device_train_batch_size=ppo.micro_batch_size,
        gradient_accumulation_steps=ppo.mini_batch_size // ppo.micro_batch_size,
        max_steps=planned_updates(ppo) * steps,
        gradient_checkpointing=ppo.gradient_checkpointing,
        lora=ppo.lora,
    )
    arguments = trainer_arguments(
        train_params, params.model, params.seed, context.work, continues=False
    )
    for name in ("max_length", "train_sampling_strategy"):  # only trainers on given texts have them
        del arguments[name]
    return arguments | {
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


def build_trainer(
    trainer_class: Any, config: Any, context: TrainingContext, callback: OnlineCallback
) -> Any:
    """One of TRL's trainers, on the prompts of `context`, with the samples of `callback`."""
    lora = context.params.ppo.lora
    rows = [{"prompt": text, "prompt_index": index} for index, text in enumerate(callback.texts)]
    trainer = trainer_class(
        model=context.sft,
        reward_funcs=callback.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=context.tokenizer,
        callbacks=[callback],
        # a config, since of a ready PeftModel TRL would keep a copy as the reference
        peft_config=lora_config(lora, "CAUSAL_LM", context.sft) if lora.r else None,
    )
    trainer.policy_callback = callback
    return trainer


def run(trainer: Any) -> PolicyCallback:
    """Train with a trainer of `build_trainer`; returns its callback."""
    callback: OnlineCallback = trainer.policy_callback
    callback.begin(trainer.model)
    callback.train(trainer)
    return callback
