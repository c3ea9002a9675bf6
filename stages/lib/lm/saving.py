"""Merging, saving and copying weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.files import read_json, write_json


def merge_adapter(model: Any, dtype: torch.dtype) -> Any:
    """The plain model with its adapter added in: summed in float32, kept in `dtype`."""
    if hasattr(model, "merge_and_unload"):
        model = model.to(torch.float32).merge_and_unload()
    for (
        parameter
    ) in model.parameters():  # not model.to(dtype): rotary frequencies, a buffer, must stay float32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def save_trained(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A PeftModel's adapter, a whole model, or a head."""
    if hasattr(model, "peft_config"):
        save_adapter(model, folder)
    elif isinstance(model, PreTrainedModel):
        save_model(model, tokenizer, folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), folder / "head.safetensors")


def save_adapter(model: Any, folder: Path) -> None:
    """A PeftModel's adapter; the same files in every process (peft writes its sets in any order,
    and DVC would see another adapter).
    """
    model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = read_json(path, "")
    write_json(
        path,
        {
            key: sorted(value) if key == "target_modules" and isinstance(value, list) else value
            for key, value in config.items()
        },
    )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights (safetensors), config and tokenizer in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainable_named(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


def trainable_state_dict(model: Any) -> dict[str, Tensor]:
    """The trained weights by name, as they are: they move on with the model."""
    return {name: parameter.detach() for name, parameter in trainable_named(model)}


@torch.no_grad()
def load_trainable(model: Any, weights: dict[str, Tensor]) -> None:
    for name, parameter in trainable_named(model):
        parameter.copy_(weights[name])
