"""Rollouts sampled by vLLM (`ppo.use_vllm`), through TRL's VLLMGeneration.

vLLM runs on the GPU of this process, or as a `vllm serve` server. Needs `pip install 'trl[vllm]'`.
Its speed is not measured; the tests use a stand-in for vLLM, which needs a GPU
(tests/stages/ppo/trainer/test_vllm.py).
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.progress import progress
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

    def __init__(self, policy: Any, tokenizer: Any, params: Params) -> None:
        """
        Raises:
            BadInput: vLLM is not installed.
        """
        ppo, self.logprobs = params.ppo, list[float]()
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
            # by default vLLM reserves memory for texts as long as the model's context
            max_model_length=params.prepare.max_prompt_tokens + ppo.response_length,
            # of the sampled tokens; the trainer computes its own, and only compares them with these
            logprobs=0,
            generation_kwargs={
                "ignore_eos": True,
                "stop_token_ids": end_tokens(policy, tokenizer).ids,
            },
        )

    def sample(self, prompt_ids: list[TokenIds], _: torch.Generator) -> list[TokenIds]:
        """One response per prompt by the current policy; an end token is kept if it was sampled."""
        with progress("sampling by vLLM"):
            self.generation.sync_weights()
            _, responses, logprobs, _ = self.generation.generate(
                prompt_ids, images=None, num_generations=1
            )
        # TRL gives a list per token, with None for NaN
        self.logprobs = [math.nan if x is None else x for [x] in chain.from_iterable(logprobs)]
        return [list(response) for response in responses]
