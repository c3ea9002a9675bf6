"""A trained policy and its reference: the same model before training, with adapters one set of
weights, else a frozen copy. The reference is the round's SFT model; also if the policy starts from
another policy's weights.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import read_json
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import ModelParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.lora import adapter_config, adapter_disabled, adapter_weights, is_adapter
from stages.lib.lm.packing import (
    Packed,
    can_start_from_states,
    forward_layers,
    num_layers_below_adapters,
)
from stages.lib.lm.responses import Response, sample_responses
from stages.lib.lm.saving import load_trainable, saved_weights_hash, weights_hash
from stages.lib.lm.vllm_engine import VllmEngine
from stages.lib.lm.world import is_sharded, split_weights


class ReferenceView:
    """A model that can also be used as it was before training: a PeftModel, or a model with all
    weights trained; or one that is not trained at all.

    Attributes:
        frozen: the copy from before training; None of a PeftModel; the model itself if it is not
            trained.
        first_trained_layer: training runs from the states that enter this layer, since the frozen
            layers below it give the same ones for both roles and in every epoch; None: it runs from
            the tokens, because no layer is frozen, or the model cannot start from states.
    """

    def __init__(
        self, model: Any, gradient_checkpointing: bool = False, is_trained: bool = True
    ) -> None:
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        self.frozen: Any = None
        self.first_trained_layer: int | None = None
        if isinstance(model, PeftModel):
            below = num_layers_below_adapters(model)
            self.first_trained_layer = below if can_start_from_states(model, below) else None
        else:
            self.frozen = (copy.deepcopy(model) if is_trained else model).requires_grad_(False)

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the model is as it was before training."""
        return adapter_disabled(self.model) if self.frozen is None else nullcontext(self.frozen)

    def trained_states(self, packed: Packed, entering: Tensor) -> Tensor:
        """(M, H) last hidden states of the trained model, from the (M, H) states that enter
        `first_trained_layer`.
        """
        first = self.first_trained_layer
        return forward_layers(
            self.model,
            packed,
            None if first is None else entering,
            first or 0,
            gradient_checkpointing=self.gradient_checkpointing,
        )[0]


class SampledPolicy:
    """The policy in training, with its reference.

    Args:
        policy: a model that is as it was before training.
        tokenizer: its tokenizer.
        engine: samples in place of stages/lib/lm/generation.py.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    def __init__(
        self,
        policy: Any,
        tokenizer: Any,
        engine: VllmEngine | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.policy, self.tokenizer, self.engine = policy, tokenizer, engine
        self.policy_view = ReferenceView(policy, gradient_checkpointing)

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the policy is as it was before training."""
        return self.policy_view.reference()

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[Response]:
        """One response per prompt by the current policy."""
        return sample_responses(
            self.policy,
            self.tokenizer,
            prompt_ids,
            generator,
            response_length=ppo.response_length,
            temperature=ppo.temperature,
            engine=self.engine,
        )


def load_weights(policy: Any, folder: Path, params: ModelParams) -> None:
    """Give a policy the weights of another one, which may have been trained from another SFT model.

    Args:
        policy: a PeftModel, or a model of which all weights are trained.
        folder: of the other policy.
        params: section `model` of params.yaml.

    Raises:
        BadInput: one of them is an adapter and the other is not, or the adapters differ in shape.
        KeyError, RuntimeError: the models differ in their weights' names or shapes.
    """
    if is_adapter(folder) and hasattr(policy, "peft_config"):
        weights = adapter_weights(folder)
        own = get_peft_model_state_dict(policy)
        scaling = adapter_config(folder).lora_alpha
        if shapes(weights) == shapes(own) and scaling == policy.active_peft_config.lora_alpha:
            set_peft_model_state_dict(policy, weights)
            return
    elif not is_adapter(folder) and not hasattr(policy, "peft_config"):
        # a model that is sharded may not fit on a GPU
        device = torch.device("cpu") if is_sharded(policy) else None
        weights = dict(load_causal_lm(folder, params, device).named_parameters())
        if further := sorted(weights.keys() - dict(policy.named_parameters()).keys()):
            raise KeyError(f"{folder} has {further[0]}, which the policy has not")
        load_trainable(policy, split_weights(policy, weights))
        return
    raise BadInput(
        f"{folder}: the policy cannot start from these weights, since ppo.lora differs from that "
        "of their training; set ppo.lora as it was, or ppo.init_from to sft"
    )


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


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
