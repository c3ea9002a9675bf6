"""TRL's SFTTrainer and RewardTrainer on the texts, adapters and settings of Rondo's stages, for
gpu.py. Imported late, since TRL takes seconds and memory.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stages.lib.core.params import Params
from stages.lib.core.params.shared import LoraParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.lora import lora_config


def sft_trainer(
    model: Any,
    tokenizer: Any,
    rows: Sequence[TokenIds],
    prompt: int,
    arguments: dict[str, Any],
    params: Params,
    callbacks: list[Any],
) -> SFTTrainer:
    """The first `prompt` tokens of each row are not learnt."""
    masks = [[0] * prompt + [1] * (len(row) - prompt) for row in rows]
    return SFTTrainer(
        model=with_trls_attention(model),
        args=SFTConfig(**arguments, completion_only_loss=True),
        train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": masks}),
        processing_class=tokenizer,
        peft_config=pefts_lora(params.sft.lora, "CAUSAL_LM", model),
        callbacks=callbacks,
    )


def reward_trainer(
    model: Any,
    tokenizer: Any,
    rows: Sequence[TokenIds],
    arguments: dict[str, Any],
    params: Params,
    callbacks: list[Any],
) -> RewardTrainer:
    """The first half of the rows is chosen, the second half rejected."""
    half = len(rows) // 2
    return RewardTrainer(
        model=with_trls_attention(model),
        args=RewardConfig(
            **arguments, center_rewards_coefficient=params.reward.center_rewards_coefficient
        ),
        train_dataset=Dataset.from_dict({"chosen_ids": rows[:half], "rejected_ids": rows[half:]}),
        processing_class=tokenizer,
        peft_config=pefts_lora(params.reward.lora, "SEQ_CLS", model),
        callbacks=callbacks,
    )


def with_trls_attention(model: Any) -> Any:
    """The model with what TRL's users have by default."""
    model.set_attn_implementation("sdpa")
    return model


def pefts_lora(lora: LoraParams, task: str, model: Any) -> LoraConfig:
    """The stage's adapters with peft's own layers."""
    config = lora_config(lora, task, model)
    names = ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type")
    return LoraConfig(**{name: getattr(config, name) for name in (*names, "layers_to_transform")})
