"""The layers below a model's lowest adapter: frozen, so computed once a rollout, for two roles and all epochs."""

from typing import Any

import torch
from torch import Tensor

from stages.generation import Packed, hidden_states, precision, unwrap


class SharedTrunk:
    """The trunk of a PeftModel, whose layers from `first` on have adapters.

    The role with the adapter off (reference, reward model) runs all layers once; what it found at layer `first` is
    where the role with the adapter on (policy, critic) starts, as often as it is asked.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.trunk = model, unwrap(model).base_model
        [(self.name, self.layers)] = [(n, m) for n, m in self.trunk.named_children() if isinstance(m, torch.nn.ModuleList)]
        self.first = next(i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters()))

    @torch.no_grad()
    def frozen(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Adapter off: (B, L, H) last hidden states, (B, L, H) states that enter layer `first`."""
        entering: list[Tensor] = []
        hook = self.layers[self.first].register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
        try:
            with self.model.disable_adapter():
                return hidden_states(self.model, packed), entering[0]
        finally:
            hook.remove()

    def adapted(self, packed: Packed, entering: Tensor) -> Tensor:
        """Adapter on: (B, L, H) last hidden states."""
        setattr(self.trunk, self.name, self.layers[self.first :])
        try:
            with precision(self.model):
                return self.trunk(inputs_embeds=entering, attention_mask=packed.attention_mask, use_cache=False).last_hidden_state
        finally:
            setattr(self.trunk, self.name, self.layers)
