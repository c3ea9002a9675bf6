"""Loading of tokenizers and models from local folders.

Weights are safetensors, code from the hub is never run, and models are in eval mode (no dropout).
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import is_flash_attn_2_available

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.errors import BadInput
from stages.lib.core.launch import cores, is_launched, local_rank
from stages.lib.core.model_folders import (
    CONFIG,
    check_calibration,
    check_weights,
    damage_named,
    read_config,
)
from stages.lib.core.params import Params
from stages.lib.core.params.shared import Dtype, LoraParams, ModelParams
from stages.lib.core.progress import progress
from stages.lib.core.ram import trim_heap
from stages.lib.lm import world
from stages.lib.lm.lora import is_adapter, load_adapters

MEMBERS = "members"  # subfolder of a reward model with the further members of its ensemble


def setup_torch(params: Params) -> torch.device:
    """Set threads, seed and GPU of this process, and join it to those that share its work; return
    the device to use.

    Raises:
        BadInput: there are more processes than GPUs.
    """
    use_one_gpu()
    world.join()
    # By default torch has a thread per core of the machine, more than a container's quota allows.
    if params.model.threads or cores() < torch.get_num_threads():
        torch.set_num_threads(params.model.threads or cores())
    torch.manual_seed(params.seed)
    return default_device()


def use_one_gpu() -> None:
    """Hide all GPUs but one: a process uses one, and TRL refuses to train on several.

    Call it before anything uses CUDA, which reads the variable once.

    Raises:
        BadInput: there are more processes than GPUs.
    """
    if (count := torch.cuda.device_count()) > 1 or (count and is_launched()):
        named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        if local_rank() >= count:
            raise BadInput(
                f"process {local_rank() + 1} of this stage has no GPU, since {count} can be seen: "
                "lower launcher.processes"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = named[local_rank()]
        if not is_launched():
            print(
                f"uses GPU {named[0]} alone; choose another with CUDA_VISIBLE_DEVICES", flush=True
            )


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype; `auto` is bfloat16 if its matrix products are fast here, else float32.

    They are fast on a GPU with bf16 and on a CPU with AVX512-BF16 or AMX.
    """
    if dtype is not Dtype.auto:
        return torch.bfloat16 if dtype is Dtype.bfloat16 else torch.float32
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def resolve_attention(params: ModelParams) -> str:
    """transformers' name of the attention; `auto` is `grouped` on a CPU.

    On a GPU it is FlashAttention-2 if that is installed and the dtype is bfloat16, else `sdpa`.
    """
    if params.attn_implementation != "auto":
        return params.attn_implementation
    if not torch.cuda.is_available():
        return "grouped"
    flash = is_flash_attn_2_available() and resolve_dtype(params.dtype) is torch.bfloat16
    return "flash_attention_2" if flash else "sdpa"


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration of a model folder.

    Raises:
        BadInput: there is no model, its weights are quantised, it needs code of its own, or its
            config.json is damaged.
    """
    if not (path / "config.json").exists():
        raise BadInput(f"{path}: no model there; run the stage before (`dvc repro` names it)")
    if quantised := read_config(path).get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise BadInput(
            f"{path}: its weights are quantised ({method}, quantization_config in config.json), "
            "and Rondo cannot train them; name the model with its original weights"
        )
    with damage_named(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    return config


def supported_attention(kind: Any, config: PreTrainedConfig, params: ModelParams) -> str:
    """`resolve_attention`, but of what `auto` gives only what the model's code can do: `grouped` or
    FlashAttention-2, else `sdpa`, else `eager`.

    Args:
        kind: the Auto class of transformers.
        config: of the model.
        params: section `model` of params.yaml.
    """
    attention = resolve_attention(params)
    if params.attn_implementation != "auto":
        return attention
    model = kind._model_mapping[type(config)]
    if attention == "flash_attention_2" and model._supports_flash_attn:
        return attention
    # without it, the model's code calls no attention but its own
    if attention == "grouped" and model._supports_attention_backend:
        return attention
    return "sdpa" if model._supports_sdpa else "eager"


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, with padding on the left.

    Raises:
        BadInput: the folder has no tokenizer, or its pad token is missing or equal to EOS. Padding
            is masked in training, so EOS would be, too.
    """
    if not (path / "tokenizer_config.json").exists():
        raise BadInput(f"{path}: no tokenizer there; run `dvc repro assets`")
    tokenizer = load_any_tokenizer(path)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise BadInput(
            f"{path}: pad_token must exist and differ from eos_token {tokenizer.eos_token!r}; "
            "set it in tokenizer_config.json"
        )
    if (path / CONFIG).exists():
        check_vocabulary(path, tokenizer)
    return tokenizer


def load_any_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, with padding on the left; its pad token may be missing, or EOS.

    Raises:
        BadInput: it cannot be used.
    """
    with damage_named(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, padding_side="left", local_files_only=True, trust_remote_code=False
        )
        tokenizer("x")  # of a damaged config, some values show only here
    return tokenizer


def check_same_tokens(
    folder: Path, tokenizer: PreTrainedTokenizerBase, key: str, otherwise: str
) -> None:
    """Check that a model that others trained reads the tokens of assets.model. The folder of an
    adapter may have no tokenizer.

    Args:
        folder: of the model.
        tokenizer: of assets.model.
        key: of params.yaml that names the folder, for the message.
        otherwise: the next step, for the message.

    Raises:
        BadInput: it has other tokens.
    """
    if is_adapter(folder) and not (folder / "tokenizer_config.json").exists():
        return
    if load_any_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise BadInput(
            f"{key} {folder}: its tokens are not those of assets.model. Next: {otherwise}"
        )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id of a token: some vocabularies have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model has all tokens of a tokenizer, which may be that of another model.

    Raises:
        BadInput: it has fewer.
    """
    size = vocabulary_size(tokenizer)
    if size > (entries := getattr(load_config(path).get_text_config(), "vocab_size", size)):
        raise BadInput(
            f"{path}: {CONFIG}'s vocab_size is {entries}, but the tokenizer of "
            f"{tokenizer.name_or_path} has {size} tokens: they are of different models; train both "
            "from one base model, or copy model and tokenizer again"
        )


def add_classifier(config: PreTrainedConfig) -> None:
    """Make a classifier of transformers' generic one for an architecture that transformers has none
    of, e.g. LFM2, Granite and ERNIE 4.5.
    """
    known = AutoModelForSequenceClassification._model_mapping
    if type(config) in known or type(config) not in AutoModelForCausalLM._model_mapping:
        return
    causal = AutoModelForCausalLM._model_mapping[type(config)]
    common = next(base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    classifier = type(
        causal.__name__.replace("ForCausalLM", "ForSequenceClassification"),
        (GenericForSequenceClassification, common),
        {
            "base_model_prefix": causal.base_model_prefix,
            "config_class": type(config),
            # else transformers takes it for a user's code, whose buffers it leaves as they are
            "__module__": causal.__module__,
        },
    )
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)


def _load(
    kind: Any,
    path: Path,
    params: ModelParams,
    device: torch.device | None,
    new_head: bool = False,
    **more: Any,
) -> PreTrainedModel:
    """Load a model in eval mode.

    Args:
        kind: the Auto class of transformers.
        path: the model folder.
        params: section `model` of params.yaml.
        device: where the model is to be; None: `default_device`.
        new_head: whether a causal LM may become a classifier, whose score head is then random.
        more: further arguments of `from_pretrained`.

    Raises:
        BadInput: there is no model; transformers or the model lacks the attention that params.yaml
            names; transformers has no such class of its architecture; or weights of the class are
            missing, which transformers would only warn of and initialise at random.
    """
    config = load_config(path)
    if kind is AutoModelForSequenceClassification:
        add_classifier(config)
    if type(config) not in kind._model_mapping:
        raise BadInput(
            f"{path}: transformers has no {kind.__name__} for the architecture "
            f"{config.model_type}; choose a model of another one"
        )
    trim_heap()  # what an earlier model's work left free is in pieces too small for weights
    attention = supported_attention(kind, config, params)
    with progress(f"loading {path}"), damage_named(path):
        try:
            model, loading_info = kind.from_pretrained(
                path,
                dtype=resolve_dtype(params.dtype),
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **more,
            )
        except (ImportError, KeyError, ValueError) as error:
            if params.attn_implementation == "auto":
                raise
            raise BadInput(
                f"model.attn_implementation is {attention}, and transformers cannot load {path} "
                f"with it: {error} Set it to `auto`"
            ) from error
    saved_as, missing = config.architectures or [], set(loading_info["missing_keys"])
    if new_head and type(model).__name__ not in saved_as:
        missing = {name for name in missing if not name.startswith("score.")}
    check_weights(path, missing, loading_info["unexpected_keys"])
    if kind is AutoModelForCausalLM and "score.weight" in loading_info["unexpected_keys"]:
        raise BadInput(
            f"{path}: its weights have score.weight: it is a classifier, not a language model; "
            "name the model that it was made from"
        )
    loaded: PreTrainedModel = model.to(device or default_device()).eval()
    return loaded


def load_causal_lm(path: Path, params: ModelParams, device: torch.device | None = None) -> Any:
    """A causal language model in eval mode, on `device` or on `default_device`.

    Raises:
        BadInput: there is no such model.
    """
    return _load(AutoModelForCausalLM, path, params, device)


def load_language_model_of(
    path: Path, params: ModelParams, device: torch.device | None = None
) -> Any:
    """The language model in a model of texts and images, without the weights of the images.

    Raises:
        BadInput: there is no such model, or its language model has no class of its own.
    """
    config = load_config(path).get_text_config()
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise BadInput(
            f"{path}: a model of texts and images, of whose language model ({config.model_type}) "
            "transformers has no AutoModelForCausalLM; choose another model"
        )
    whole = _load(AutoModelForImageTextToText, path, params, device)
    model = AutoModelForCausalLM.from_config(
        config, dtype=whole.dtype, attn_implementation=whole.config._attn_implementation
    )
    model.base_model.load_state_dict(whole.get_decoder().state_dict())
    model.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
    return model.to(whole.device).eval()


def load_policy(sft: Path, policy: Path, params: ModelParams) -> Any:
    """A trained policy in eval mode.

    Args:
        sft: folder of the SFT model.
        policy: folder of the policy: an adapter, or a whole model if all weights were trained.
        params: section `model` of params.yaml.

    Returns:
        A PeftModel on the SFT model, or the whole model.
    """
    if not is_adapter(policy):
        return load_causal_lm(policy, params)
    return load_adapters(load_causal_lm(sft, params), policy).eval()


def training_model_params(model: ModelParams, lora: LoraParams) -> ModelParams:
    """Params of a model to train: float32 if all weights are trained (r 0).

    Small updates of a bfloat16 weight would be rounded away.
    """
    return model if lora.r else model.model_copy(update={"dtype": Dtype.float32})


def load_sequence_classifier(
    path: Path, params: ModelParams, device: torch.device | None = None, new_head: bool = True
) -> PreTrainedModel:
    """A model with a head of one number, without ensemble, on `device` or on `default_device`; with
    `new_head`, a causal LM gets a new, random head. The head may have OpenRLHF's older name.
    """
    kind, renamed = AutoModelForSequenceClassification, {}
    if head := read_config(path).get("value_head_prefix"):
        renamed = {"key_mapping": {rf"^{re.escape(head)}\.": "score."}}
    return _load(kind, path, params, device, new_head, num_labels=1, **renamed)


def load_reward_model(
    path: Path, params: ModelParams, device: torch.device | None = None
) -> PreTrainedModel:
    """A reward model, with the further members of its ensemble if it has any, on `device` or on
    `default_device`.

    `config.mean` and `config.std` calibrate its scores to SFT demonstrations
    (stages/reward/__main__.py).
    """
    folders = [path, *sorted((path / MEMBERS).glob("*"))]
    members = [load_sequence_classifier(folder, params, device, False) for folder in folders]
    for folder, member in zip(folders, members, strict=True):
        check_calibration(folder, member.config)
    return attach_ensemble(members[0], members[1:])


def attach_ensemble(
    reward_model: PreTrainedModel, others: list[PreTrainedModel]
) -> PreTrainedModel:
    """Attach the further members to the first one, and return it.

    Training and saving the model ignore them; `ensemble_members` in scoring.py finds them.
    """
    # A list, not a ModuleList, so that the members are no submodules of the first one
    reward_model.ensemble = others
    return reward_model


def check_model_lengths(path: Path, params: Params) -> None:
    """Check the longest texts of all stages against a model's positions.

    Args:
        path: the model folder.
        params: all params.

    Raises:
        BadInput: there is no model; or names the keys whose tokens are more than the model has
            positions for.
    """
    positions = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
    # EOS is appended to a response that was cut off
    rollout = params.prepare.max_prompt_tokens + params.ppo.response_length + 1
    for keys, tokens in {
        "prepare.max_prompt_tokens + ppo.response_length + 1": rollout,
        "sft.max_length": params.sft.max_length,
        "reward.max_length": params.reward.max_length,
    }.items():
        if positions and tokens > positions:
            raise BadInput(
                f"{keys} is {tokens} tokens, but {path} (assets.model) has positions for "
                f"{positions}: lower it, or choose a model with a longer context"
            )
