"""Two roles in one model: with its training (policy, critic) and without (reference, reward model)."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor

from stages.models import adapter_off
from stages.packing import Packed, flat, hidden_states, unwrap


class Trunk(Protocol):
    def reference(self) -> AbstractContextManager[Any]:
        """The model as it was before training."""
        ...

    def frozen(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """(M, H) last hidden states before training, and (M, ?) what `adapted` starts from, as often as it is asked."""
        ...

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        """(M, H) last hidden states as trained so far."""
        ...


class SharedTrunk:
    """A PeftModel, whose layers from `first` on have adapters: those below are frozen, so computed once a rollout for both roles."""

    def __init__(self, model: Any) -> None:
        self.model, self.trunk = model, unwrap(model).base_model
        [(self.name, self.layers)] = [(n, m) for n, m in self.trunk.named_children() if isinstance(m, torch.nn.ModuleList)]
        self.first = next(i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters()))

    def reference(self) -> AbstractContextManager[Any]:
        return adapter_off(self.model)

    @torch.no_grad()
    def frozen(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """`entering`: the states that enter layer `first`."""
        entering: list[Tensor] = []
        hook = self.layers[self.first].register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
        try:
            with self.reference():
                return hidden_states(self.model, packed), flat(packed, entering[0])
        finally:
            hook.remove()

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        setattr(self.trunk, self.name, self.layers[self.first :])
        try:
            return hidden_states(self.model, packed, entering)
        finally:
            setattr(self.trunk, self.name, self.layers)


class FrozenModel:
    """A model that is not trained at all; nothing enters where nothing is adapted."""

    def __init__(self, model: Any) -> None:
        self.was = model.requires_grad_(False)

    def reference(self) -> AbstractContextManager[Any]:
        return nullcontext(self.was)

    @torch.no_grad()
    def frozen(self, packed: Packed) -> tuple[Tensor, Tensor]:
        hidden = hidden_states(self.was, packed)
        return hidden, hidden[..., :0]


class WholeModel(FrozenModel):
    """A model that is trained whole, beside a frozen copy of what it was; they share nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__(copy.deepcopy(model))
        self.model = model

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        return hidden_states(self.model, packed)


def trunk_of(model: Any) -> Trunk:
    return SharedTrunk(model) if isinstance(model, PeftModel) else WholeModel(model)
