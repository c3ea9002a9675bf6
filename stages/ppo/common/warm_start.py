"""A policy that starts from the champion's weights instead of its reference, the round's SFT model.

The KL is that from the round's SFT model all the same.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import ModelParams
from stages.lib.lm.loading import is_adapter, load_causal_lm
from stages.lib.lm.saving import load_trainable
from stages.lib.lm.sharding import is_sharded, split_weights


def load_weights(policy: Any, folder: Path, params: ModelParams) -> None:
    """Give a policy the weights of another one, which may have been trained from another SFT model.

    Args:
        policy: a PeftModel, or a model of which all weights are trained.
        folder: of the other policy.
        params: section `model` of params.yaml.

    Raises:
        BadInput: one of them is an adapter and the other is not, or the adapters differ in shape.
    """
    if is_adapter(folder) and hasattr(policy, "peft_config"):
        weights = load_peft_weights(str(folder), device="cpu")
        own = get_peft_model_state_dict(policy)
        scaling = PeftConfig.from_pretrained(str(folder)).lora_alpha
        if _shapes(weights) == _shapes(own) and scaling == policy.active_peft_config.lora_alpha:
            set_peft_model_state_dict(policy, weights)
            return
    elif not is_adapter(folder) and not hasattr(policy, "peft_config"):
        # a model that is sharded may not fit on a GPU
        device = torch.device("cpu") if is_sharded(policy) else None
        weights = dict(load_causal_lm(folder, params, device).named_parameters())
        load_trainable(policy, split_weights(policy, weights))
        return
    raise BadInput(
        f"{folder}: the policy cannot start from these weights, since ppo.lora differs from that "
        "of their training; set ppo.lora as it was, or ppo.init_from to sft"
    )


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}
