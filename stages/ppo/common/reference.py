"""Two roles in one model: with its training (policy, critic) and without (reference, reward model)."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from peft import PeftModel
from torch import Tensor

from stages.lib.lm.loading import adapter_disabled
from stages.lib.lm.packing import Packed, hidden_states
from stages.lib.lm.shared_layers import forward_layers, num_layers_below_adapters


class ReferenceView(Protocol):
    first: (
        int | None
        # the lowest layer that is trained, where training starts from states that enter it; None: from
        # the tokens
    )

    def reference(self) -> AbstractContextManager[Any]:
        """The model as it was before training."""
        ...

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        """(M, H) last hidden states as trained so far, from (M, H) states that enter layer `first`."""
        ...


class SharedTrunk:
    """A PeftModel, whose layers from `first` on have adapters: those below are frozen, so computed
    once a rollout for both roles.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first: int | None = num_layers_below_adapters(model)

    def reference(self) -> AbstractContextManager[Any]:
        return adapter_disabled(self.model)

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        return forward_layers(self.model, packed, entering, self.first or 0)[0]


class FrozenModel:
    """A model that is not trained at all."""

    first: int | None = None

    def __init__(self, model: Any) -> None:
        self.was = model.requires_grad_(False)

    def reference(self) -> AbstractContextManager[Any]:
        return nullcontext(self.was)


class WholeModel(FrozenModel):
    """A model that is trained whole, beside a frozen copy of what it was; they share nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__(copy.deepcopy(model))
        self.model = model

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        return hidden_states(self.model, packed)


def reference_view(model: Any) -> ReferenceView:
    return SharedTrunk(model) if isinstance(model, PeftModel) else WholeModel(model)
