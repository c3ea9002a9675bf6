"""Adapters: peft's LoRA, whose linear layers add the adapter's product in place.

peft's own layer casts its input to float32, autocast casts it back, and scaling and sum are passes
of their own over all tokens: on a CPU an eighth of a PPO update (docs/log.md). Folders, merging and
everything else are peft's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor
from transformers import PreTrainedModel

from stages.lib.core.params.shared import LoraParams

Matrices = tuple[
    Tensor, Tensor
]  # A (r, in) and scaled B (out, r), in the dtype that is computed in


def lora_linear(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """(M, out) x W' + c + (x A') B' of (M, in) tokens, and the (M, r) x A'."""
    inner = tokens @ low.T
    return torch.nn.functional.linear(tokens, weight, bias).addmm_(inner, high.T), inner


class LoraLinearFunction(torch.autograd.Function):
    """x W' + c + s (x A') B' of x (..., in), W (out, in), c (out,) or None, A (r, in), B (out, r);
    W and c are frozen.

    Computed in x's dtype; the gradients of A and B are in theirs.
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
        tokens, low, high = x.reshape(-1, x.shape[-1]), a.to(x.dtype), (b * scaling).to(x.dtype)
        outer, inner = lora_linear(tokens, weight, bias, low, high)
        ctx.save_for_backward(tokens, weight, low, high, inner)
        ctx.scaling, ctx.shape, ctx.dtype = scaling, x.shape, a.dtype
        return outer.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        tokens, weight, low, high, inner = ctx.saved_tensors
        outer = gradients[0].reshape(-1, weight.shape[0])
        through = outer @ high
        x = (
            (outer @ weight).addmm_(through, low).view(ctx.shape)
            if ctx.needs_input_grad[0]
            else None
        )
        return (
            x,
            None,
            None,
            (through.T @ tokens).to(ctx.dtype),
            (outer.T @ inner).to(ctx.dtype) * ctx.scaling,
            None,
        )


class FusedLinear(Linear):
    """peft's layer where the adapter is off, merged, one of several, or anything but two matrices.
    `held`: see `cached_adapter_weights`.
    """

    held: Matrices | None = None

    def plain(self) -> bool:
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
        if kwargs or x.dtype != weight.dtype or not (self.held or self.plain()):
            return super().forward(x, *args, **kwargs)
        if self.held:
            return lora_linear(x.reshape(-1, x.shape[-1]), weight, bias, *self.held)[0].view(
                *x.shape[:-1], -1
            )
        outer: Tensor = LoraLinearFunction.apply(x, weight, bias, *self.adapter())
        return outer


@contextmanager
@torch.no_grad()
def cached_adapter_weights(model: Any) -> Iterator[None]:
    """For many short products between which nothing is learnt, as in generation: adapters are cast
    and scaled once, not for each.
    """
    layers = [
        layer for layer in model.modules() if isinstance(layer, FusedLinear) and layer.plain()
    ]
    for layer in layers:
        low, high, scaling = layer.adapter()
        dtype = layer.base_layer.weight.dtype
        layer.held = low.to(dtype), (high * scaling).to(dtype)
    try:
        yield
    finally:
        for layer in layers:
            layer.held = None


def with_fused_linear(config: PeftConfig) -> PeftConfig:
    config._register_custom_module({torch.nn.Linear: FusedLinear})
    return config


def lora_config(params: LoraParams, task_type: str, model: PreTrainedModel) -> PeftConfig:
    """Dropout is 0, else ratios would not be 1 at PPO's first update.

    `top_layers` puts adapters on the upper layers only; peft then wants the modules by name.
    """
    targets, layers = params.target_modules, None
    if params.top_layers is not None:
        count = model.config.get_text_config().num_hidden_layers
        layers = list(range(max(count - params.top_layers, 0), count))
        if targets == "all-linear":
            targets = sorted(
                {
                    name.rpartition(".")[2]
                    for name, module in model.base_model.named_modules()
                    if isinstance(module, torch.nn.Linear)
                }
            )
    return with_fused_linear(
        LoraConfig(
            r=params.r,
            lora_alpha=params.lora_alpha,
            lora_dropout=0.0,
            target_modules=targets,
            task_type=task_type,
            layers_to_transform=layers,
        )
    )


def add_adapters(model: PreTrainedModel, params: LoraParams, task_type: str) -> Any:
    """The model with fresh adapters, or as it is where `params.r` is 0."""
    return get_peft_model(model, lora_config(params, task_type, model)) if params.r else model


def load_adapters(model: PreTrainedModel, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(
        model, str(folder), config=with_fused_linear(PeftConfig.from_pretrained(str(folder)))
    )
