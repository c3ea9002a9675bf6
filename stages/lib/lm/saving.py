"""Saving of trained models to folders, and copies of trained weights in memory.

In order: merging an adapter into its model; saving an adapter, a whole model or a head; hashes of
weights; reading and writing the trainable weights of a model in memory.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.files import file_hash, read_json, write_json
from stages.lib.core.progress import progress, tracked
from stages.lib.lm import world
from stages.lib.lm.packing import unwrap_peft
from stages.lib.lm.world import gather_weights, is_sharded, local


def merge_adapter(model: Any, dtype: torch.dtype) -> Any:
    """The plain model with its adapter merged: summed in float32, stored in `dtype`."""
    if hasattr(model, "merge_and_unload"):
        model = model.to(torch.float32).merge_and_unload()
    # Not model.to(dtype): the rotary frequencies, a buffer, must stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def save_trained(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save what was trained: the adapter of a PeftModel, or a whole model. The folder is made
    anew: a process that was killed while it saved may have left some files there.

    The first process writes. If the model is sharded, all must call it.
    """
    weights = gather_weights(model, model.state_dict()) if is_sharded(model) else None
    if not world.is_main():
        return
    if folder.exists():
        shutil.rmtree(folder)
    if hasattr(model, "peft_config"):
        save_adapter(model, folder)
    else:
        save_model(model, tokenizer, folder, weights)


def save_adapter(model: Any, folder: Path) -> None:
    """Save a PeftModel's adapter, with the same bytes in every process."""
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = read_json(path)
    # peft writes a set in any order, and DVC would see a different adapter.
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(path, config)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Save weights (safetensors), config and tokenizer in one folder; weights: None: the model's
    own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with progress(f"saving {folder}"):
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def saved_weights_hash(folder: Path) -> str:
    """sha256 of the names and contents of a folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    hashes = "".join(f"{file.name} {file_hash(file)}\n" for file in files)
    return hashlib.sha256(hashes.encode()).hexdigest()


def weights_hash(model: Any) -> str:
    """sha256 of a model's weights in memory, without adapters: their names, types and numbers.

    If the model is sharded, all processes must call it; they get the hash of its whole weights.
    """
    digest = hashlib.sha256()
    weights = sorted(unwrap_peft(model).state_dict().items())
    for name, weight in tracked("hashing weights", weights, len(weights), "tensors"):
        if "lora_" not in name:
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            title = f"{name.replace('.base_layer', '')} {weight.dtype} {[*weight.shape]}"
            digest.update(title.encode())
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def trainable_named(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The trainable parameters with their names."""
    return [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


def sum_of_trainable(model: Any) -> float:
    """The sum of all trainable weights that this process holds as a whole: equal weights have equal
    sums.
    """
    return sum(
        weight.double().sum().item()
        for _, weight in trainable_named(model)
        if not isinstance(weight, DTensor)
    )


def trainable_state_dict(model: Any) -> dict[str, Tensor]:
    """The trainable weights by name; of a sharded model, the parts of this process. Not copies:
    they change when the model is trained.
    """
    return {name: local(parameter) for name, parameter in trainable_named(model)}


def policy_weights(model: Any) -> dict[str, Tensor]:
    """Copies of a policy's adapter, or of all weights if it has none, by name."""
    adapter_only = hasattr(model, "peft_config")
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name or not adapter_only
    }


@torch.no_grad()
def load_trainable(model: Any, weights: dict[str, Tensor]) -> None:
    """Copy weights, by name, into the model's trainable parameters.

    weights: as `trainable_state_dict` returns them.
    """
    for name, parameter in trainable_named(model):
        local(parameter).copy_(weights[name])
