"""The table of model families in docs/models.md: a random model of each architecture goes through
the stage assets, which compares Rondo's numbers of it with those of transformers.

    python docs/bench/families.py          # tries all of them and prints the table
    python docs/bench/families.py --write  # replaces it in docs/models.md

tests/stages/assets/test_families.py tries each of them too, and compares it with the table.
"""

import argparse
import importlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import trl
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from stages.assets.base_model import tiny_tokenizer, write_model
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.packing import supports_packing

PAGE = Path("docs/models.md")
MARKERS = "<!-- families -->\n", "<!-- end -->"
SPREAD = 0.2  # of weights: logits of a new model are so alike that an error hides
SIZES: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": 448, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
DIM = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
# of texts and images
IMAGES = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 64}
SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, **IMAGES}
QWEN_IMAGES = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, **IMAGES}
SHARED = {"shared_expert_intermediate_size": 32}


class Family(NamedTuple):
    """models: what people bring of it. config: name of its config's class, and its arguments."""

    models: str
    config: str
    arguments: dict[str, Any]


FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM2, TinyLlama, Yi", "LlamaConfig", SIZES),
    "mistral": Family("Mistral 7B", "MistralConfig", SIZES | {"sliding_window": 16}),
    "mixtral": Family("Mixtral", "MixtralConfig", SIZES | LOCAL_EXPERTS),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2Config", SIZES),
    "qwen2_moe": Family("Qwen1.5-MoE", "Qwen2MoeConfig", SIZES | EXPERTS | SHARED),
    "qwen3": Family("Qwen3", "Qwen3Config", SIZES | DIM),
    "qwen3_moe": Family("Qwen3-30B-A3B", "Qwen3MoeConfig", SIZES | DIM | EXPERTS),
    "qwen3_next": Family("Qwen3-Next", "Qwen3NextConfig", SIZES | DIM | EXPERTS | SHARED | DELTA),
    "qwen3_5_text": Family("Qwen3.5", "Qwen3_5TextConfig", SIZES | DIM | DELTA),
    "gemma": Family("Gemma", "GemmaConfig", SIZES | DIM),
    "gemma2": Family("Gemma 2", "Gemma2Config", SIZES | DIM | {"sliding_window": 16}),
    "gemma3_text": Family("Gemma 3", "Gemma3TextConfig", SIZES | DIM | {"sliding_window": 16}),
    "gemma3n_text": Family(
        "Gemma 3n",
        "Gemma3nTextConfig",
        {
            **SIZES | DIM,
            "intermediate_size": [96, 96],
            "vocab_size_per_layer_input": 448,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gpt_oss": Family(
        "gpt-oss", "GptOssConfig", SIZES | DIM | LOCAL_EXPERTS | {"sliding_window": 16}
    ),
    "lfm2": Family("LFM2", "Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"]}),
    "phi": Family("Phi-1.5, Phi-2", "PhiConfig", SIZES),
    "phi3": Family("Phi-3, Phi-4", "Phi3Config", SIZES),
    "smollm3": Family("SmolLM3", "SmolLM3Config", SIZES),
    "olmo": Family("OLMo", "OlmoConfig", SIZES),
    "olmo2": Family("OLMo 2", "Olmo2Config", SIZES),
    "olmo3": Family("OLMo 3", "Olmo3Config", SIZES | {"sliding_window": 16}),
    "granite": Family("Granite 3", "GraniteConfig", SIZES | {"logits_scaling": 4.0}),
    "granitemoehybrid": Family(
        "Granite 4",
        "GraniteMoeHybridConfig",
        SIZES
        | MAMBA
        | LOCAL_EXPERTS
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    ),
    "cohere": Family("Command R", "CohereConfig", SIZES),
    "cohere2": Family("Command R7B, Command A", "Cohere2Config", SIZES | {"sliding_window": 16}),
    "glm4": Family("GLM-4", "Glm4Config", SIZES | DIM),
    "exaone4": Family("EXAONE 4", "Exaone4Config", SIZES | {"sliding_window": 16}),
    "ernie4_5": Family("ERNIE 4.5", "Ernie4_5Config", SIZES | DIM),
    "hunyuan_v1_dense": Family("Hunyuan", "HunYuanDenseV1Config", SIZES | DIM),
    "seed_oss": Family("Seed-OSS", "SeedOssConfig", SIZES | DIM),
    "apertus": Family("Apertus", "ApertusConfig", SIZES),
    "deepseek_v3": Family(
        "DeepSeek V3",
        "DeepseekV3Config",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "falcon": Family("Falcon", "FalconConfig", HEADS),
    "falcon_h1": Family(
        "Falcon-H1",
        "FalconH1Config",
        SIZES
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
        | {"lm_head_multiplier": 0.5},
    ),
    "stablelm": Family("StableLM", "StableLmConfig", SIZES),
    "starcoder2": Family("StarCoder 2", "Starcoder2Config", SIZES | {"sliding_window": 16}),
    "gpt2": Family("GPT-2", "GPT2Config", GPT2),
    "gpt_bigcode": Family("StarCoder", "GPTBigCodeConfig", GPT2),
    "gpt_neo": Family(
        "GPT-Neo",
        "GPTNeoConfig",
        {
            "vocab_size": 448,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "max_position_embeddings": 512,
        },
    ),
    "gpt_neox": Family("Pythia, GPT-NeoX", "GPTNeoXConfig", HEADS),
    "gptj": Family("GPT-J", "GPTJConfig", GPT2 | {"rotary_dim": 8}),
    "codegen": Family("CodeGen", "CodeGenConfig", GPT2 | {"rotary_dim": 8}),
    "opt": Family("OPT", "OPTConfig", HEADS | {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "bloom": Family(
        "BLOOM", "BloomConfig", {"vocab_size": 448, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    ),
    "mpt": Family(
        "MPT", "MptConfig", {"vocab_size": 448, "d_model": 64, "n_heads": 4, "n_layers": 2}
    ),
    "xglm": Family(
        "XGLM",
        "XGLMConfig",
        {"vocab_size": 448, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    ),
    "nanochat": Family("nanochat", "NanoChatConfig", SIZES),
    "nemotron": Family("Nemotron, Minitron", "NemotronConfig", SIZES),
    "doge": Family("Doge", "DogeConfig", SIZES),
    "jamba": Family(
        "Jamba",
        "JambaConfig",
        SIZES
        | {"num_experts": 2, "use_mamba_kernels": False}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "bamba": Family("Bamba", "BambaConfig", SIZES | MAMBA | {"attn_layer_indices": [1]}),
    "minimax": Family(
        "MiniMax",
        "MiniMaxConfig",
        SIZES | DIM | LOCAL_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "mamba": Family(
        "Mamba", "MambaConfig", {"vocab_size": 448, "hidden_size": 64, "num_hidden_layers": 2}
    ),
    "gemma3": Family(
        "Gemma 3 from 4B on",
        "Gemma3Config",
        {
            "text_config": SIZES | DIM | {"model_type": "gemma3_text", "sliding_window": 16},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": Family(
        "Mistral Small 3.1",
        "Mistral3Config",
        {
            "text_config": SIZES | DIM | {"model_type": "mistral"},
            "vision_config": SIGLIP | {"model_type": "pixtral"},
        },
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        "Qwen3_5Config",
        {"text_config": SIZES | DIM | DELTA, "vision_config": QWEN_IMAGES},
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLConfig",
        {"text_config": SIZES, "vision_config": QWEN_IMAGES},
    ),
    "llama4": Family(
        "Llama 4",
        "Llama4Config",
        {"text_config": SIZES | DIM | LOCAL_EXPERTS, "vision_config": SIGLIP},
    ),
    "rwkv": Family(
        "RWKV 4", "RwkvConfig", {"vocab_size": 448, "hidden_size": 64, "num_hidden_layers": 2}
    ),
    "recurrent_gemma": Family(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        SIZES | {"intermediate_size": 192, "num_hidden_layers": 3, "lru_width": 64},
    ),
}


class Chat(NamedTuple):
    """How a family's tokenizer writes conversations.

    template: TRL's copy of the family's own. thinks: whether answers without thoughts need
    `enable_thinking: false`.
    """

    template: str
    bos: str
    eos: str
    thinks: bool = False


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOKENS = re.compile(r"<\|[^|>\s]+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
CHATS = {
    "llama": Chat("llama3_2", "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2": Chat("qwen2_5", "", "<|im_end|>"),
    "qwen3": Chat("qwen3", "", "<|im_end|>", thinks=True),
    "qwen3_moe": Chat("qwen3_instruct_2507", "", "<|im_end|>"),
    "qwen3_5_text": Chat("qwen3_5_think", "", "<|im_end|>", thinks=True),
    "gemma": Chat("gemma", "<bos>", "<eos>"),
    "gemma2": Chat("gemma", "<bos>", "<eos>"),
    "gemma3_text": Chat("gemma3", "<bos>", "<eos>"),
    "gemma3n_text": Chat("gemma3", "<bos>", "<eos>"),
    "gpt_oss": Chat("gptoss", "<|startoftext|>", "<|return|>"),
    "lfm2": Chat("lfm2", "<|startoftext|>", "<|im_end|>"),
    "phi3": Chat("phi3", "<s>", "<|endoftext|>"),
    "cohere": Chat("cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "glm4": Chat("glm4moe", "", "<|endoftext|>", thinks=True),
}
"""Of the families whose template is in TRL."""


def tokenizer_of(name: str) -> Any:
    """A small tokenizer with the chat template of a family, if it is known, and its tokens."""
    tokenizer = tiny_tokenizer()
    if chat := CHATS.get(name):
        template = (TEMPLATES / f"{chat.template}.jinja").read_text(encoding="utf-8")
        special = {"eos_token": chat.eos, **({"bos_token": chat.bos} if chat.bos else {})}
        tokens = sorted(set(TOKENS.findall(template)))
        tokenizer.add_special_tokens({**special, "extra_special_tokens": tokens})
        tokenizer.chat_template = template
    return tokenizer


def params_of(name: str, model: Path, settings: dict[str, Any]) -> Params:
    """Settings with a model of a family, and with its chat template if it is known."""
    prepare = settings.get("prepare", {})
    if chat := CHATS.get(name):
        arguments = {"enable_thinking": False} if chat.thinks else {}
        prepare = prepare | {"prompt_format": "chat", "chat_template_kwargs": arguments}
    own = {"assets": {"model": str(model), "data": "tiny"}, "prepare": prepare}
    return check_params(settings | own, "families")


def random_model(name: str, folder: Path) -> Path:
    """A folder with a random model of a family, its logits far from each other."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.arguments)
    torch.manual_seed(0)
    kind = (
        AutoModelForImageTextToText if "vision_config" in family.arguments else AutoModelForCausalLM
    )
    model = kind.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=SPREAD)
    model.save_pretrained(folder)
    tokenizer_of(name).save_pretrained(folder)
    return folder


def attempt(name: str, folder: Path) -> tuple[str, str, str]:
    """How rows run, whose classifier the reward model is, and the result of assets: `right`, or the
    reason why the family is refused.
    """
    mine, written = random_model(name, folder / "mine"), folder / "written"
    params = params_of(name, mine, {"model": {"attn_implementation": "auto"}})
    mapping = AutoModelForSequenceClassification._model_mapping
    try:
        write_model(params, written)
    except BadInput as error:
        reason = str(error).partition("cannot compute this architecture: ")[2]
        reason = reason or str(error).removeprefix(f"{mine}: ")
        return "", "", re.sub(r" by \S+ nats per token, at most \S+ is rounding", "", reason)
    model = load_causal_lm(written, params.model)
    rows = "end to end" if supports_packing(model, 1) else "padded"
    classifier = mapping[type(model.config)]
    of_transformers = hasattr(importlib.import_module(classifier.__module__), classifier.__name__)
    owner = "transformers" if of_transformers else "Rondo"
    return rows, owner, "right"


def table(tried: Callable[[str, Path], tuple[str, str, str]]) -> str:
    lines = ["| family | models | chat template | rows | classifier | result |", "|---" * 6 + "|"]
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows, owner, result = tried(name, Path(folder))
        template = CHATS[name].template if name in CHATS else ""
        cells = (name, family.models, template, rows, owner, result)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def replace(text: str, new: str) -> str:
    """The text with this table between its two markers."""
    before, _, rest = text.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{new}\n{MARKERS[1]}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    new_table = table(attempt)
    print(new_table)
    if options.write:
        PAGE.write_text(replace(PAGE.read_text(), new_table))
