"""A tiny Llama that every test of models shares: random, float32, 2 layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import stages.attention  # noqa: F401 - registers `grouped`

torch.set_num_threads(1)  # a second thread costs tiny models more than it gives

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "grouped",
}


@pytest.fixture
def tiny_lm() -> Callable[..., Any]:
    def build(seed: int = 0, spread: float = 0.2) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=spread)).eval()

    return build


@pytest.fixture
def tiny_reward_model() -> Callable[..., Any]:
    def build(seed: int = 1) -> LlamaForSequenceClassification:
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(LlamaConfig(**TINY, num_labels=1, initializer_range=0.2)).eval()
        model.config.mean, model.config.std = 0.0, 1.0
        return model

    return build
