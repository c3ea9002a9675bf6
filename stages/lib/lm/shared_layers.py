"""Models that were trained on their upper layers alone have the lower ones in common: those run
once for all.

M tokens of rows end to end, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from stages.lib.lm.packing import Packed, flatten_states, hidden_states, pack, unwrap_peft


class IdentityLayer(torch.nn.Module):
    """In the place of a layer that has run already: what a layer is (its kind of attention) goes by
    its number.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def find_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """The module that holds the layers, under which name, and they themselves."""
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
    """How many of the lowest layers have no adapters."""
    *_, layers = find_layers(model)
    adapted = (
        i
        for i, layer in enumerate(layers)
        if any(isinstance(m, BaseTunerLayer) for m in layer.modules())
    )
    return next(adapted, len(layers))


def num_shared_layers(*models: Any) -> int:
    """How many of the lowest layers, with the embedding below them, are the same in all models, bit
    for bit.

    0 where states cannot be handed on, which is tried on the first model, since all are of one
    kind: some do more with an embedding than pass it to their first layer.
    """
    first, *others = models
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
    return same if same and _handed_on(first, same) else 0


def _equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    if a is b:
        return True
    ours, theirs = a.state_dict(), b.state_dict()
    return (
        type(a) is type(b)
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


@torch.no_grad()
def _handed_on(model: Any, first: int) -> bool:
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
) -> tuple[Tensor, list[Tensor]]:
    """(M, H) last hidden states, and the (M, H) states that enter layers `keep`; from the tokens,
    or from what enters layer `first`.
    """
    with _without(model, 0 if entering is None else first), _watched(model, keep) as seen:
        return hidden_states(model, packed, entering), [
            flatten_states(packed, seen[number]) for number in keep
        ]


@contextmanager
def _without(model: Any, first: int) -> Iterator[None]:
    """The layers below `first` do nothing."""
    holder, name, layers = find_layers(model)
    setattr(
        holder,
        name,
        torch.nn.ModuleList([*(IdentityLayer() for _ in range(first)), *layers[first:]]),
    )
    try:
        yield
    finally:
        setattr(holder, name, layers)


@contextmanager
def _watched(model: Any, numbers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """What enters these layers in the next forward pass."""
    *_, layers = find_layers(model)
    seen: dict[int, Tensor] = {}

    def watch(number: int) -> Any:
        return layers[number].register_forward_pre_hook(
            lambda _, inputs: seen.update({number: inputs[0]})
        )

    hooks = [watch(number) for number in set(numbers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
