"""Small random models of common architectures, adapters with random weights, and rows for them."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.lora import add_adapters

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
SHAPES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SIZES),
}
# They add position embeddings to the states that their layers start from
POSITIONS_ADDED = {
    "gpt2": GPT2Config(
        vocab_size=40,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
    ),
    "opt": OPTConfig(
        vocab_size=40,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        init_std=0.2,
    ),
}
# Windows as long as the longest texts of the tests: 5 tokens of a prompt and 6 of a response
SLIDING = {"mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=11)}
ALL_SHAPES = SHAPES | POSITIONS_ADDED | SLIDING
# Rows that cannot run end to end, since a window is shorter than the texts or layers pass a state
# from token to token; and logits that the config changes after the head
GROUPS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
PADDED = {
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3),
    "gpt_oss": GptOssConfig(
        **GROUPS, num_local_experts=4, num_experts_per_tok=2, sliding_window=3, pad_token_id=None
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **GROUPS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "lfm2": Lfm2Config(**GROUPS, layer_types=["conv", "full_attention", "conv"], pad_token_id=None),
}
CHANGED_LOGITS = {
    "gemma2": Gemma2Config(**GROUPS, final_logit_softcapping=1.0, pad_token_id=None),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25, pad_token_id=None),
    "granite": GraniteConfig(**SIZES, num_key_value_heads=2, logits_scaling=4.0, pad_token_id=None),
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
RESPONSES = [[20, 21, 2], [22, 23, 24, 25], [26], [27, 28]]


def build(config: PreTrainedConfig, attention: str = "grouped") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_adapters(model: Any, top_layers: int | None = None) -> Any:
    model = add_adapters(model, LoraParams(r=2, top_layers=top_layers), "CAUSAL_LM")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model
