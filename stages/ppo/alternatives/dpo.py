"""DPO (Rafailov et al. 2023) on the pairs that the reward model learns from; no reward model and no
samples while it learns.
"""

from typing import Any

from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params.shared import TrainParams
from stages.lib.core.types import Row
from stages.lib.data.prompts import encode
from stages.lib.data.splits import prompt_key
from stages.lib.lm.lora import lora_config
from stages.lib.lm.packing import padding_free
from stages.lib.training.trl_setup import trainer_arguments
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.policy import TrainingContext

NAMES = {name: name for name in ("loss", "grad_norm", "learning_rate")} | {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
}


def train(setting: TrainingContext) -> PolicyCallback:
    round_ = setting.recorder.round
    rows = read_jsonl(
        stage_dir(round_, "annotate") / "data/pairs_train.jsonl", f"dvc repro annotate@{round_}"
    )
    course = PolicyCallback(setting, NAMES)
    trainer = make_trainer(setting, pairs(rows, setting), course)
    course.begin(trainer.model)
    with padding_free(trainer.model):
        trainer.train()
    return course


def make_trainer(setting: TrainingContext, rows: list[Row], course: PolicyCallback) -> DPOTrainer:
    params, lora = setting.params, setting.params.ppo.lora
    sizes = TrainParams(
        **params.dpo.model_dump(exclude={"beta"}),
        max_steps=params.ppo.max_steps,
        max_length=params.reward.max_length,
    )
    arguments = trainer_arguments(sizes, params.model, params.seed, setting.work, continues=False)
    trainer = TokenDpoTrainer(
        model=setting.sft,
        args=DPOConfig(
            **arguments, beta=params.dpo.beta, remove_unused_columns=False
        ),  # pairs of like length make a batch, by `length`
        train_dataset=Dataset.from_list(rows),
        processing_class=setting.tokenizer,
        callbacks=[course],
        peft_config=lora_config(lora, "CAUSAL_LM", setting.sft)
        if lora.r
        else None,  # of a PeftModel it would keep a copy as reference
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class TokenDpoTrainer(DPOTrainer):
    """On rows that are tokens: TRL's own come of prompt and response as one text, and differ where
    these meet.
    """

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def pairs(rows: list[Row], setting: TrainingContext) -> list[Row]:
    """TRL's columns, and `length`; without the pairs of held-out prompts, on which the policy will
    be validated.

    Raises:
        BadInput: none is left.
    """
    params, held_out = setting.params, {prompt_key(row["prompt"]) for row, _ in setting.held_out}
    made = []
    for row in rows:
        if prompt_key(row["prompt"]) in held_out:
            continue
        sides = (
            encode(
                setting.tokenizer,
                row["prompt"],
                row[side],
                params.prepare.prompt_format,
                params.reward.max_length,
            )
            for side in ("chosen", "rejected")
        )
        (first, chosen), (second, rejected) = sides
        prompt = min(first, second, key=len)  # a long one is cut for a long response
        made.append(
            {
                "prompt_ids": prompt,
                "chosen_ids": chosen,
                "rejected_ids": rejected,
                "length": len(prompt) + max(len(chosen), len(rejected)),
            }
        )
    if not made:
        raise BadInput(
            f"all {len(rows)} pairs are of held-out prompts: lower ppo.validation_prompts, or add pairs"
        )
    return made
