"""Stands for vLLM and for a vLLM server, which need a GPU: the classes and functions that Rondo
calls, with vLLM 0.32.0's signatures (tests/stages/lib/lm/test_vllm_itself.py compares them).

It keeps vLLM's behaviour where Rondo depends on it: an adapter is read once per number, new weights
remove all adapters, each request has its own seed, and keys and values outlive new weights until
they are reset.
"""

import copy
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation import vllm_generation  # noqa: F401 - asks for vLLM when it is imported

from stages.lib.lm import vllm_engine
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import token_logprobs

engines: list = []  # every LLM that was started
without_lora = False  # whether the model's class supports no LoRA


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass(kw_only=True)
class EngineArgs:
    model: str
    skip_tokenizer_init: bool = False

    def create_model_config(self):
        return SimpleNamespace(architectures=AutoConfig.from_pretrained(self.model).architectures)


class ModelRegistry:
    @staticmethod
    def resolve_model_cls(architectures, model_config):
        return SimpleNamespace(supports_lora=not without_lora), architectures[0]


def supports_lora(model):
    return model.supports_lora


class Weights:
    """A model of transformers, whose weights can be replaced and adapted."""

    def __init__(self, model):
        self.model, self.loads, self.error = model, 0, 0.0

    def load(self, weights):
        self.loads += 1
        with torch.no_grad():
            for name, weight in weights:
                self.model.get_parameter(name).copy_(weight)

    def respond(self, model, prompt, length, temperature, seed, ends):
        """Tokens and log-probabilities; `error` is added to the latter."""
        [tokens] = sample(model, [prompt], length, temperature, seed, ends)
        [logprobs] = token_logprobs(model, [prompt], [tokens], temperature=temperature)
        return tokens, (logprobs + self.error).tolist()


class LLM(Weights):
    def __init__(
        self,
        model,
        *,
        skip_tokenizer_init=False,
        dtype="auto",
        seed=0,
        gpu_memory_utilization=0.92,
        **kwargs,
    ):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        super().__init__(loaded.eval())
        torch.manual_seed(seed)
        self.options = kwargs | {"gpu_memory_utilization": gpu_memory_utilization}
        assert skip_tokenizer_init and kwargs["generation_config"] == "vllm"
        assert kwargs["logprobs_mode"] == "processed_logprobs"
        self.adapters, self.stale_cache, self.requests = {}, False, []
        engines.append(self)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights"
        self.load(kwargs["weights_iterator"])
        self.adapters, self.stale_cache = {}, True

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.stale_cache = False
        return True

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        assert not self.stale_cache
        self.requests += [(params, lora_request) for params in sampling_params]
        model = self.adapted(lora_request) if lora_request else self.model
        return [
            self.output(model, prompt["prompt_token_ids"], params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def adapted(self, request):
        number = request.lora_int_id
        if number not in self.adapters:
            assert self.options["enable_lora"] and number > 0
            model = PeftModel.from_pretrained(copy.deepcopy(self.model), request.lora_path).eval()
            assert model.peft_config["default"].r <= self.options["max_lora_rank"]
            self.adapters = {number: model}  # max_loras 1
        return self.adapters[number]

    def output(self, model, prompt, params):
        assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
        assert params.ignore_eos and params.logprobs == 0 and not params.detokenize
        tokens, logprobs = self.respond(
            model,
            prompt,
            params.max_tokens,
            params.temperature,
            params.seed,
            params.stop_token_ids,
        )
        by_token = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        completion = SimpleNamespace(token_ids=tuple(tokens), logprobs=by_token)
        return SimpleNamespace(outputs=[completion])


class VLLMClient(Weights):
    """TRL's client, with a server that has the model `model`."""

    model_of_server = None

    def __init__(
        self,
        base_url=None,
        host="0.0.0.0",
        server_port=8000,
        group_port=51216,
        connection_timeout=0.0,
    ):
        super().__init__(self.model_of_server)
        self.base_url, self.seed = base_url, 0
        engines.append(self)

    def init_communicator(self, device=0):
        self.device = device

    def update_named_params(self, metadata, named_params):
        received = list(named_params)
        assert metadata == [
            (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
            for name, weight in received
        ]
        self.load(received)
        self.stale_cache = True

    def reset_prefix_cache(self):
        self.stale_cache = False

    def generate(
        self,
        prompts,
        features=None,
        n=1,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=16,
        logprobs=0,
        structured_outputs_regex=None,
        generation_kwargs=None,
    ):
        # a seed would be the same for every prompt
        assert set(generation_kwargs) == {"ignore_eos", "stop_token_ids"} and not self.stale_cache
        ends, completions = generation_kwargs["stop_token_ids"], []
        for prompt in prompts:
            self.seed += 1
            completions.append(
                self.respond(self.model, prompt, max_tokens, temperature, self.seed, ends)
            )
        return {
            "completion_ids": [tokens for tokens, _ in completions],
            "logprobs": [
                [[None if value != value else value] for value in values]
                for _, values in completions
            ],
        }


def sample(model, prompts, length, temperature, seed, ends):
    return generate(
        model,
        prompts,
        response_length=length,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
        ends=EndTokens(ends[0], tuple(ends[1:])),
    )


def install(monkeypatch):
    """Make it what `import vllm` finds, and what TRL takes for its client."""
    this, modules = sys.modules[__name__], {}
    contents = {
        "vllm": ["LLM", "SamplingParams"],
        "vllm.lora": [],
        "vllm.lora.request": ["LoRARequest"],
        "vllm.engine": [],
        "vllm.engine.arg_utils": ["EngineArgs"],
        "vllm.model_executor": [],
        "vllm.model_executor.models": ["ModelRegistry", "supports_lora"],
    }
    for name, members in contents.items():
        modules[name] = ModuleType(name)
        for member in members:
            setattr(modules[name], member, getattr(this, member))
        monkeypatch.setitem(sys.modules, name, modules[name])
    monkeypatch.setattr("stages.lib.lm.vllm_engine.find_spec", lambda name: name)
    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient", VLLMClient)
    # LocalVllm sets them; monkeypatch removes them again after the test
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr(this, "without_lora", False)
    engines.clear()
    vllm_engine._engine.cache_clear()
    return this
