"""Lower layers that several models share run once for all of them.

Models from the same base that were trained on their upper layers only have equal lower layers.
Shapes: M tokens of rows end to end, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.lib.lm.packing import Packed, flatten_states, hidden_states, pack, unwrap_peft


class IdentityLayer(torch.nn.Module):
    """Stands in for a layer that has run already.

    The other layers must keep their numbers, because some models choose the kind of attention by
    the number of the layer.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class CheckpointedLayer(torch.nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # the layers have no dropout
        return checkpoint(
            self.layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def find_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """Find the decoder layers of a model.

    Returns:
        The module that contains the list of layers, the list's attribute name, and the list.
    """
    trunk, count = (
        unwrap_peft(model).base_model,
        unwrap_peft(model).config.get_text_config().num_hidden_layers,
    )
    path, layers = next(
        (p, m)
        for p, m in trunk.named_modules()
        if isinstance(m, torch.nn.ModuleList) and len(m) == count
    )
    above, _, name = path.rpartition(".")
    return trunk.get_submodule(above), name, layers


def num_layers_below_adapters(model: Any) -> int:
    """Number of layers below the lowest one with an adapter."""
    *_, layers = find_layers(model)
    adapted = (
        i
        for i, layer in enumerate(layers)
        if any(isinstance(m, BaseTunerLayer) for m in layer.modules())
    )
    return next(adapted, len(layers))


def num_shared_layers(*models: Any) -> int:
    """Number of the lowest layers that are bit-identical in all models, embeddings included.

    0 if a model cannot start from hidden states: some, e.g. GPT-2, add position embeddings before
    the first layer. This is tried on the first model, because all have the same architecture.
    """
    first, *others = models
    # The last layer is never shared, so that each model has at least one of its own.
    same = min(len(find_layers(first)[2]) - 1, *map(num_layers_below_adapters, models))
    for other in others:
        if type(unwrap_peft(first).base_model) is not type(unwrap_peft(other).base_model):
            return 0
        if not _equal(
            unwrap_peft(first).get_input_embeddings(), unwrap_peft(other).get_input_embeddings()
        ):
            return 0
        pairs = zip(find_layers(first)[2][:same], find_layers(other)[2][:same], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if not _equal(a, b)), same)
    return same if same and can_start_from_states(first, same) else 0


def _equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    if a is b:
        return True
    weights_a, weights_b = a.state_dict(), b.state_dict()
    return (
        type(a) is type(b)
        and weights_a.keys() == weights_b.keys()
        and all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    )


@torch.no_grad()
def can_start_from_states(model: Any, first: int) -> bool:
    """Whether the layers from `first` on give the whole model's result, on a probe.

    Not those of GPT-2 and OPT, which add position embeddings to the states that they start from.
    """
    row = pack([[1, 2, 3]], [[]], unwrap_peft(model).device)
    whole, [entering] = forward_layers(model, row, keep=[first])
    return torch.allclose(
        forward_layers(model, row, entering, first)[0], whole, rtol=1e-2, atol=1e-2
    )


def forward_layers(
    model: Any,
    packed: Packed,
    entering: Tensor | None = None,
    first: int = 0,
    keep: Sequence[int] = (),
    gradient_checkpointing: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run a model, or its layers from `first` on.

    Args:
        model: a transformers model or a PeftModel.
        packed: the rows.
        entering: (M, H) states that enter layer `first`; None: start from the tokens.
        first: number of the first layer to run, if `entering` is given.
        keep: numbers of layers whose entering states are returned, too.
        gradient_checkpointing: keep only the states between layers for the backward pass.

    Returns:
        (M, H) last hidden states, and the (M, H) states that enter each layer of `keep`.
    """
    skipped = 0 if entering is None else first
    with (
        _with_layers(model, skipped, gradient_checkpointing),
        _record_inputs(model, keep) as inputs,
    ):
        states = hidden_states(model, packed, entering)
        return states, [flatten_states(packed, inputs[number]) for number in keep]


@contextmanager
def _with_layers(model: Any, first: int, gradient_checkpointing: bool) -> Iterator[None]:
    """Within this context, the layers below `first` do nothing, and the others may be
    checkpointed.
    """
    holder, name, layers = find_layers(model)
    upper = map(CheckpointedLayer, layers[first:]) if gradient_checkpointing else layers[first:]
    setattr(holder, name, torch.nn.ModuleList([*(IdentityLayer() for _ in range(first)), *upper]))
    try:
        yield
    finally:
        setattr(holder, name, layers)


@contextmanager
def _record_inputs(model: Any, numbers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Within this context, record the states that enter these layers, by number of the layer."""
    *_, layers = find_layers(model)
    recorded: dict[int, Tensor] = {}

    def record(number: int) -> Any:
        return layers[number].register_forward_pre_hook(
            lambda _, inputs: recorded.update({number: inputs[0]})
        )

    hooks = [record(number) for number in set(numbers)]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
