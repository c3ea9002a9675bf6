"""LoRA adapters: peft's, with a faster linear layer that adds the adapter's product in place.

peft's own layer casts its input to float32, autocast casts it back, and scaling and sum each pass
over all tokens again. On a CPU this took an eighth of a PPO update (docs/log.md). File formats,
merging and everything else are peft's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
)
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stages.lib.core.errors import BadInput
from stages.lib.core.model_folders import FIX, check_weights, damage_named, tensor_names
from stages.lib.core.params.shared import LoraParams

ADAPTER = "adapter_model.safetensors"  # the file of the weights
Matrices = tuple[Tensor, Tensor]  # A (r, in) and scaled B (out, r), in the dtype of computation


def lora_linear(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """A linear layer with an adapter.

    Args:
        tokens: x (M, in).
        weight: W (out, in).
        bias: c (out,), or None.
        low: A (r, in).
        high: B (out, r), scaled.

    Returns:
        (M, out) x W' + c + (x A') B', and (M, r) x A'.
    """
    inner = tokens @ low.T
    return torch.nn.functional.linear(tokens, weight, bias).addmm_(inner, high.T), inner


class LoraLinearFunction(torch.autograd.Function):
    """x W' + c + s (x A') B' with gradients of x, A and B; W and c are frozen.

    x (M, in), W (out, in), c (out,) or None, A (r, in), B (out, r), s the scaling. Computed in the
    dtype of x; the gradients of A and B have their dtype. The result is no view, so that a model
    may change it in place (Falcon).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        low, high = a.to(x.dtype), (b * scaling).to(x.dtype)
        outer, inner = lora_linear(x, weight, bias, low, high)
        ctx.save_for_backward(x, weight, low, high, inner)
        ctx.scaling, ctx.dtype = scaling, a.dtype
        return outer

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, low, high, inner = ctx.saved_tensors
        [outer] = gradients
        through = outer @ high
        to_x = (outer @ weight).addmm_(through, low) if ctx.needs_input_grad[0] else None
        return (
            to_x,
            None,
            None,
            (through.T @ x).to(ctx.dtype),
            (outer.T @ inner).to(ctx.dtype) * ctx.scaling,
            None,
        )


class FusedLinear(Linear):
    """peft's linear layer, with a fast path for the usual case.

    The fast path needs one active adapter that is not merged, and has no dropout or variant.
    `cached`: the adapter's matrices within `cached_adapter_weights`.
    """

    cached: Matrices | None = None

    def has_fast_path(self) -> bool:
        """Whether the layer is in the state that the fast path computes."""
        names = self.active_adapters
        unusual = (
            self.disable_adapters
            or self.merged
            or self.lora_variant
            or self.base_layer.weight.requires_grad
        )
        return (
            not unusual
            and len(names) == 1
            and names[0] in self.lora_A
            and isinstance(self.lora_dropout[names[0]], torch.nn.Identity)
        )

    def adapter(self) -> tuple[Tensor, Tensor, float]:
        """A, B, scaling."""
        [name] = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, bias = self.base_layer.weight, self.base_layer.bias
        if kwargs or x.dtype != weight.dtype or not (self.cached or self.has_fast_path()):
            return super().forward(x, *args, **kwargs)
        tokens = x.reshape(-1, x.shape[-1])
        outer: Tensor = (
            lora_linear(tokens, weight, bias, *self.cached)[0]
            if self.cached
            else LoraLinearFunction.apply(tokens, weight, bias, *self.adapter())
        )
        return outer.view(*x.shape[:-1], -1)


@contextmanager
@torch.no_grad()
def cached_adapter_weights(model: Any) -> Iterator[None]:
    """Within this context, adapters are cast and scaled once instead of in each forward pass.

    For generation, with its many short forward passes. The weights must not change inside.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, FusedLinear) and layer.has_fast_path()
    ]
    for layer in layers:
        low, high, scaling = layer.adapter()
        dtype = layer.base_layer.weight.dtype
        layer.cached = low.to(dtype), (high * scaling).to(dtype)
    try:
        yield
    finally:
        for layer in layers:
            layer.cached = None


def with_fused_linear(config: PeftConfig) -> PeftConfig:
    """The config, changed in place so that peft uses FusedLinear for linear layers."""
    config._register_custom_module({torch.nn.Linear: FusedLinear})
    return config


def lora_config(params: LoraParams, task_type: str, model: PreTrainedModel) -> PeftConfig:
    """peft's config for these params.

    Dropout is 0, because otherwise the probability ratios would not be 1 at PPO's first update.
    """
    targets, layers = params.target_modules, None
    linear = {
        name.rpartition(".")[2]
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }
    if params.top_layers is not None:
        count = model.config.get_text_config().num_hidden_layers
        layers = list(range(max(count - params.top_layers, 0), count))
        # peft accepts layers_to_transform only with modules by name, not with "all-linear".
        if targets == "all-linear":
            targets = sorted(linear)
    config = LoraConfig(
        r=params.r,
        lora_alpha=params.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type=task_type,
        layers_to_transform=layers,
    )
    if params.target_modules == "all-linear":
        refused = sorted(name for name in linear if is_refused(config, model, name))
        config.exclude_modules = refused or None
    return with_fused_linear(config)


def is_refused(config: PeftConfig, model: PreTrainedModel, module: str) -> bool:
    """Whether peft refuses an adapter of a module, whose weight the kernels of some state space
    models read past it.
    """
    try:
        _check_lora_target_modules_mamba(config, model, module)
    except ValueError:
        return True
    return False


def add_adapters(model: PreTrainedModel, params: LoraParams, task_type: str) -> Any:
    """The model with new adapters, or the model itself if `params.r` is 0."""
    return get_peft_model(model, lora_config(params, task_type, model)) if params.r else model


def adapter_config(folder: Path) -> PeftConfig:
    """The config of the adapter saved in `folder`.

    Raises:
        BadInput: it is damaged.
    """
    with damage_named(folder):
        return with_fused_linear(PeftConfig.from_pretrained(str(folder)))


def adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the adapter saved in `folder`, on the CPU.

    Raises:
        BadInput: they are missing or damaged.
    """
    path = folder / ADAPTER
    if not path.exists():  # peft would look for it on the hub
        raise BadInput(f"{path} is missing; {FIX}")
    with damage_named(folder):
        weights: dict[str, torch.Tensor] = load_peft_weights(str(folder), device="cpu")
        return weights


def load_adapters(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the adapter saved in `folder`."""
    config = adapter_config(folder)
    with damage_named(folder):
        adapted = PeftModel.from_pretrained(model, str(folder), config=config)
        own = set(get_peft_model_state_dict(adapted))
        weights = folder / ADAPTER
        saved = tensor_names(weights) if weights.exists() else own
        # peft itself only warns
        check_weights(folder, own - saved, saved - own)
        if extra := sorted(saved - own):
            raise BadInput(f"{folder}: the adapter's {extra[0]} is no weight of its model; {FIX}")
    return adapted


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter and not a whole model."""
    return (folder / "adapter_config.json").exists()


@contextmanager
def adapter_disabled(model: Any) -> Iterator[Any]:
    """Within this context, a PeftModel computes as it did before training."""
    with model.disable_adapter():
        yield model
