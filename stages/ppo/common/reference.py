"""A trained model and its state before training: policy and reference, critic and reward model.

With adapters both are one set of weights; without, the model before training is a frozen copy. The
reference is the round's SFT model.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from peft import PeftModel
from torch import Tensor

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json
from stages.lib.lm.loading import adapter_disabled
from stages.lib.lm.packing import Packed
from stages.lib.lm.saving import saved_weights_hash, weights_hash
from stages.lib.lm.shared_layers import (
    can_start_from_states,
    forward_layers,
    num_layers_below_adapters,
)


class ReferenceView(Protocol):
    """A trained model, which can also be used as it was before training.

    first_trained_layer: training runs from the states that enter this layer, because the layers
    below it are frozen; None if it runs from the tokens.
    """

    first_trained_layer: int | None

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the model is as it was before training."""
        ...

    def trained_states(self, packed: Packed, entering: Tensor) -> Tensor:
        """(M, H) last hidden states of the trained model, from the (M, H) states that enter
        `first_trained_layer`.
        """
        ...


class SharedTrunk:
    """A PeftModel, with adapters from `first_trained_layer` on.

    The frozen layers below give the same states for both roles and in every epoch, so they are
    computed once per rollout. A model that cannot start from their states runs as a whole.
    """

    def __init__(self, model: Any, gradient_checkpointing: bool = False) -> None:
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        below = num_layers_below_adapters(model)
        self.first_trained_layer = below if can_start_from_states(model, below) else None

    def reference(self) -> AbstractContextManager[Any]:
        return adapter_disabled(self.model)

    def trained_states(self, packed: Packed, entering: Tensor) -> Tensor:
        first = self.first_trained_layer
        return forward_layers(
            self.model,
            packed,
            None if first is None else entering,
            first or 0,
            gradient_checkpointing=self.gradient_checkpointing,
        )[0]


class FrozenModel:
    """A model that is not trained at all."""

    first_trained_layer: int | None = None

    def __init__(self, model: Any) -> None:
        self.frozen = model.requires_grad_(False)

    def reference(self) -> AbstractContextManager[Any]:
        return nullcontext(self.frozen)


class WholeModel(FrozenModel):
    """A model with all weights trained, and a frozen copy of it from before training: `frozen`."""

    def __init__(self, model: Any, gradient_checkpointing: bool = False) -> None:
        super().__init__(copy.deepcopy(model))
        self.model, self.gradient_checkpointing = model, gradient_checkpointing

    def trained_states(self, packed: Packed, entering: Tensor) -> Tensor:
        return forward_layers(
            self.model, packed, gradient_checkpointing=self.gradient_checkpointing
        )[0]


def reference_view(model: Any, gradient_checkpointing: bool = False) -> ReferenceView:
    """The view that fits the model: adapters switched off, or a frozen copy.

    gradient_checkpointing: of the passes of `trained_states`.
    """
    kind = SharedTrunk if isinstance(model, PeftModel) else WholeModel
    return kind(model, gradient_checkpointing)


def check_reference_files(sft: Path) -> None:
    """Check that the reference's files are those that the SFT stage wrote.

    Args:
        sft: the stage's folder.

    Raises:
        BadInput: the weights in sft/model have another hash than that in sft/manifest.json.
    """
    path = sft / "manifest.json"
    expected = read_json(path).get("weights")
    actual = saved_weights_hash(sft / "model")
    if expected != actual:
        raise BadInput(
            f"{sft / 'model'}: the weights of the reference have sha256 {actual}, but {path} "
            f"records {expected}; run `dvc checkout`, or `dvc repro sft@{sft.parent.name}`"
        )


def check_reference_weights(model: Any, expected: str, when: str) -> None:
    """Check the weights of the reference in memory.

    Args:
        model: the reference, or the policy whose adapter is switched off.
        expected: their `weights_hash` when training started.
        when: what has happened since, for the message.

    Raises:
        RondoError: they have another hash.
    """
    if (actual := weights_hash(model)) != expected:
        raise RondoError(
            f"ppo: {when}, the weights of the reference have sha256 {actual}, but training started "
            f"with {expected}: KL would be measured from another model. Next: run the stage with "
            "the model.dtype and the sft/model it started with, or delete its work folder to start "
            "again"
        )
