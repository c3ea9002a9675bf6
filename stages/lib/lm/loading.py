"""Loading, adapting and saving models: safetensors only, no remote code, dropout off."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json
from stages.lib.core.params import Params
from stages.lib.core.params.shared import Dtype, LoraParams, ModelParams
from stages.lib.lm.lora import load_adapters
from stages.lib.lm.reward_ensemble import MEMBERS, attach_ensemble

LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)  # of Gemma 2, Cohere, Granite


def setup_torch(params: Params) -> torch.device:
    """Threads and seeds of this process; returns the device to use."""
    if params.model.threads:
        torch.set_num_threads(params.model.threads)
    torch.manual_seed(params.seed)
    return default_device()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: Dtype) -> torch.dtype:
    """`auto` is bfloat16 where its matrix products are fast: a GPU with bf16, or a CPU with
    AVX512-BF16 or AMX.
    """
    if dtype is not Dtype.auto:
        return torch.bfloat16 if dtype is Dtype.bfloat16 else torch.float32
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder: padding on the left, pad different from eos (else EOS would
    be masked).
    """
    if not (path / "tokenizer_config.json").exists():
        raise BadInput(f"{path}: no tokenizer there; run `dvc repro assets`")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, padding_side="left", local_files_only=True
    )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise BadInput(
            f"{path}: pad_token must exist and differ from eos_token {tokenizer.eos_token!r}; set it in tokenizer_config.json"
        )
    return tokenizer


def _load(kind: Any, path: Path, params: ModelParams, **more: Any) -> PreTrainedModel:
    """
    Raises:
        BadInput: no model there, or weights are missing that its config says it has: transformers
            would make them up, and warn.
    """
    if not (path / "config.json").exists():
        raise BadInput(f"{path}: no model there; run the stage before (`dvc repro` names it)")
    model, found = kind.from_pretrained(
        path,
        dtype=resolve_dtype(params.dtype),
        attn_implementation=params.attn_implementation,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **more,
    )
    saved_as = read_json(path / "config.json", "").get("architectures") or []
    if type(model).__name__ in saved_as and (lost := sorted(found["missing_keys"])):
        raise BadInput(
            f"{path}: {', '.join(lost[:3])} is missing in its weights, lost when it was saved: run its stage again"
        )
    loaded: PreTrainedModel = model.to(default_device()).eval()
    return loaded


def load_causal_lm(path: Path, params: ModelParams) -> Any:
    """A causal LM in eval mode.

    Raises:
        BadInput: no model there, or one that does more to its logits than multiply states by its
            head: generation and
            log-probabilities here (stages/lib/lm/generation.py) would leave that out.
    """
    model = _load(AutoModelForCausalLM, path, params)
    config = model.config.get_text_config()
    if changed := [name for name in LOGIT_CHANGES if getattr(config, name, None) not in (None, 1)]:
        raise BadInput(
            f"{path}: config.json's {changed[0]} changes the logits, which Rondo does not know; choose an assets.model without it"
        )
    return model


def load_policy(sft: Path, policy: Path, params: ModelParams) -> Any:
    """What PPO has made of an SFT model, in eval mode: a PeftModel on it, or a model of its own
    where all weights were trained.
    """
    if not is_adapter(policy):
        return load_causal_lm(policy, params)
    return load_adapters(load_causal_lm(sft, params), policy).eval()


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


@contextmanager
def adapter_disabled(model: Any) -> Iterator[Any]:
    """A PeftModel as it was before training."""
    with model.disable_adapter():
        yield model


def training_model_params(model: ModelParams, lora: LoraParams) -> ModelParams:
    """Full-parameter training (r 0) needs float32 masters: a bfloat16 weight does not move by small
    steps.
    """
    return model if lora.r else model.model_copy(update={"dtype": Dtype.float32})


def load_sequence_classifier(path: Path, params: ModelParams) -> PreTrainedModel:
    """A model with one number as its head, alone; of a causal LM with a new, random head."""
    return _load(AutoModelForSequenceClassification, path, params, num_labels=1)


def load_reward_model(path: Path, params: ModelParams) -> PreTrainedModel:
    """A reward model, with the further members of its ensemble where it has any.

    `config.mean` and `config.std` calibrate its scores to SFT demonstrations (see
    stages/reward/__main__.py).
    """
    others = sorted((path / MEMBERS).glob("*"))
    return attach_ensemble(
        load_sequence_classifier(path, params),
        [load_sequence_classifier(other, params) for other in others],
    )
