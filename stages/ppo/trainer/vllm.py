"""Rollouts sampled by vLLM (`ppo.use_vllm`), through TRL's VLLMGeneration: in this process's GPU,
or by a `vllm serve`.

Needs `pip install 'trl[vllm]'`. Not measured yet: no GPU was at hand. Tested against a stand-in for
vLLM (tests/stages/ppo/test_vllm.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from stages.lib.core.errors import BadInput
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.packing import unwrap_peft


class Generation(VLLMGeneration):
    """TRL's merges adapters into the weights with peft and subtracts them again, which in bfloat16
    moves the weights below.
    """

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        model = unwrap_peft(self.model)
        adapted = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, BaseTunerLayer)
        }
        for name, weight in model.named_parameters():
            layer, whole = name.removesuffix(".base_layer.weight"), weight.detach()
            if layer in adapted:
                for adapter in adapted[layer].active_adapters:
                    whole = whole.float() + adapted[layer].get_delta_weight(adapter).float()
                yield f"{layer}.weight", whole.to(weight.dtype)
            elif "lora_" not in name:
                yield name.replace(".base_layer", ""), whole


class Vllm:
    """Samples like stages.generation.sample, but never the same twice: one seed would be every
    prompt's own.

    In bfloat16, what an adapter adds to a weight is lost where it is less than half of the weight's
    last place: with small learning rates the policy that samples lags behind the one that learns.
    """

    def __init__(self, policy: Any, tokenizer: Any, ppo: PpoParams) -> None:
        """
        Raises:
            BadInput: vLLM is not installed.
        """
        if not is_vllm_available():
            raise BadInput(
                "ppo.use_vllm: vLLM is not installed; `pip install 'trl[vllm]'` on a machine with a GPU, or set it to false"
            )
        self.generation = Generation(
            policy,
            Accelerator(),
            tokenizer,
            mode=ppo.vllm_mode.value,
            server_base_url=ppo.vllm_server_base_url,
            gpu_memory_utilization=ppo.vllm_gpu_memory_utilization,
            temperature=ppo.temperature,
            max_completion_length=ppo.response_length,
            logprobs=None,  # the trainer's own pass says them, exactly
            # the tokenizer's EOS ends a response, not others of the model's generation_config
            generation_kwargs={"ignore_eos": True, "stop_token_ids": [tokenizer.eos_token_id]},
        )

    def sample(self, prompt_ids: list[TokenIds], _: torch.Generator) -> list[TokenIds]:
        """One response a prompt by the policy as it is now; EOS is kept where it was sampled."""
        self.generation.sync_weights()
        _, responses, _, _ = self.generation.generate(prompt_ids, images=None, num_generations=1)
        return [list(response) for response in responses]
