"""Rollouts sampled by vLLM (`ppo.use_vllm`), through TRL's VLLMGeneration.

vLLM runs on the GPU of this process, or as a `vllm serve` server. Needs `pip install 'trl[vllm]'`.
Its speed is not measured; the tests use a stand-in for vLLM, which needs a GPU
(tests/stages/ppo/trainer/test_vllm.py).
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
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.packing import unwrap_peft


class MergedWeightGeneration(VLLMGeneration):
    """TRL's VLLMGeneration, which merges adapters for vLLM without changing the trained model.

    TRL merges them into the weights with peft and subtracts them again; in bfloat16 that changes
    the weights under the adapters. Here the sum is a new tensor.
    """

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        model = unwrap_peft(self.model)
        adapter_layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, BaseTunerLayer)
        }
        for name, parameter in model.named_parameters():
            layer_name, weight = name.removesuffix(".base_layer.weight"), parameter.detach()
            if layer_name in adapter_layers:
                # summed in float32, rounded once to the type of the weight
                layer = adapter_layers[layer_name]
                for adapter in layer.active_adapters:
                    weight = weight.float() + layer.get_delta_weight(adapter).float()
                yield f"{layer_name}.weight", weight.to(parameter.dtype)
            elif "lora_" not in name:
                yield name.replace(".base_layer", ""), weight


class VllmEngine:
    """Samples as `stages.lib.lm.generation.sample_responses` does, but not reproducibly.

    vLLM would start every prompt from the same seed, so it is given none. In bfloat16 the part of
    an adapter's product that is below half of a weight's last digit is lost: with small learning
    rates the policy that samples lags behind the one that is trained.
    """

    def __init__(self, policy: Any, tokenizer: Any, ppo: PpoParams) -> None:
        """
        Raises:
            BadInput: vLLM is not installed.
        """
        if not is_vllm_available():
            raise BadInput(
                "ppo.use_vllm: vLLM is not installed; `pip install 'trl[vllm]'` on a machine with "
                "a GPU, or set it to false"
            )
        self.generation = MergedWeightGeneration(
            policy,
            Accelerator(),
            tokenizer,
            mode=ppo.vllm_mode.value,
            server_base_url=ppo.vllm_server_base_url,
            gpu_memory_utilization=ppo.vllm_gpu_memory_utilization,
            temperature=ppo.temperature,
            max_completion_length=ppo.response_length,
            logprobs=None,  # the trainer's own forward pass computes them exactly
            generation_kwargs={
                "ignore_eos": True,
                "stop_token_ids": end_tokens(policy, tokenizer).ids,
            },
        )

    def sample(self, prompt_ids: list[TokenIds], _: torch.Generator) -> list[TokenIds]:
        """One response per prompt by the current policy; an end token is kept if it was sampled."""
        self.generation.sync_weights()
        _, responses, _, _ = self.generation.generate(prompt_ids, images=None, num_generations=1)
        return [list(response) for response in responses]
