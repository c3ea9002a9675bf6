"""The four roles on the tiny Llama."""

from collections.abc import Callable

import pytest
import torch
from peft import get_peft_model

from stages.models import lora_config
from stages.params import LoraParams
from stages.ppo.roles import Roles


class ByteTokenizer:
    """The little that the trainer asks of a tokenizer, for a model without text."""

    eos_token_id, pad_token_id = 2, 0

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


@pytest.fixture
def make_roles(tiny_lm, tiny_reward_model) -> Callable[..., Roles]:
    def make(kind: type[Roles] = Roles, *, lora: LoraParams, mean: float = 0.0, std: float = 1.0) -> Roles:
        policy, reward = tiny_lm(spread=0.3), tiny_reward_model()
        reward.config.mean, reward.config.std = mean, std
        torch.manual_seed(0)
        return kind(
            policy=get_peft_model(policy, lora_config(lora, "CAUSAL_LM", policy)).eval(),
            critic=get_peft_model(reward, lora_config(lora, "SEQ_CLS", reward)).eval(),
            tokenizer=ByteTokenizer(),
        )

    return make


@pytest.fixture
def shift() -> Callable[..., None]:
    """Move a model's trained weights: adapters start at zero, where they do nothing."""

    def move(model, by: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * by)

    return move
