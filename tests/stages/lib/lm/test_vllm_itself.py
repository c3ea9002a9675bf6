"""VllmEngine with vLLM itself, where it is installed: on a GPU, or its build for CPUs."""

import inspect
from dataclasses import fields
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.lora import adapter_disabled, add_adapters
from stages.lib.lm.vllm_engine import VllmEngine, check_log_ratio
from tests.stages.lib.lm import vllm_stand_in

vllm = pytest.importorskip("vllm")
PROMPTS = [[5 + i, 6, 7][: 1 + i % 3] for i in range(16)]


def names(function):
    return {name for name in inspect.signature(function).parameters if name != "kwargs"}


def test_the_stand_in_has_its_signatures():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models import ModelRegistry, supports_lora

    for method in ("__init__", "collective_rpc", "reset_prefix_cache", "generate"):
        stand_in = getattr(vllm_stand_in.LLM, method)
        assert names(stand_in) <= names(getattr(vllm.LLM, method))
    for stand_in, real in (
        (vllm_stand_in.SamplingParams, vllm.SamplingParams),
        (vllm_stand_in.LoRARequest, LoRARequest),
        (vllm_stand_in.EngineArgs, EngineArgs),
    ):
        assert {field.name for field in fields(stand_in)} <= names(real)
    stand_in, real = (
        [*inspect.signature(registry.resolve_model_cls).parameters]
        for registry in (vllm_stand_in.ModelRegistry, ModelRegistry)
    )
    assert stand_in == real
    assert names(supports_lora)


def test_it_samples_each_model_and_adapter(tmp_path, shift, monkeypatch):
    """One test, since an engine keeps its memory until the process ends."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # without compilation, which takes minutes
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, enforce_eager=True))

    def model(seed):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,
        )
        made = LlamaForCausalLM(config).eval()
        if torch.cuda.is_available():
            made = made.cuda()
        made.save_pretrained(tmp_path / str(seed))
        made.name_or_path = str(tmp_path / str(seed))
        return made

    engine = VllmEngine(ModelParams(use_vllm=True))

    def sampled(model, seed=0):
        """Responses, whose log-probabilities are compared with those of the model."""
        responses = engine.sample(
            model,
            PROMPTS,
            response_length=12,
            temperature=0.7,
            generator=torch.Generator().manual_seed(seed),
            ends=EndTokens(2, (9,)),
        )
        assert all(9 not in response[:-1] and 2 not in response[:-1] for response in responses)
        logprobs = torch.cat(token_logprobs(model, PROMPTS, responses, temperature=0.7))
        assert check_log_ratio(engine.logprobs, logprobs) < 0.01
        return responses

    policy = add_adapters(model(0), LoraParams(r=4, top_layers=1), "CAUSAL_LM").eval()
    first = sampled(policy)  # adapters are zero
    with adapter_disabled(policy) as reference:
        assert sampled(reference) == first
    shift(policy, 0.3)
    changed = sampled(policy)
    assert changed != first
    # the same seeds: the same responses, and other ones with other seeds
    assert sampled(policy) == changed != sampled(policy, seed=1)
    with adapter_disabled(policy) as reference:
        assert sampled(reference) == first
    other = model(1)
    assert sampled(other) != first
    assert sampled(policy) == changed
    # rank 32 is merged: vLLM was started for 16
    wide = add_adapters(model(2), LoraParams(r=32), "CAUSAL_LM").eval()
    shift(wide, 0.1)
    sampled(wide)
    assert any("rank 32" in reason for reason in engine.reasons)
