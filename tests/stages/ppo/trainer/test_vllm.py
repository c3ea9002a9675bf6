"""Rollouts through TRL's VLLMGeneration, with a stand-in for vLLM itself, which needs a GPU."""

import copy
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import token_logprobs
from stages.ppo.trainer.update import PpoTrainer

PPO = PpoParams(
    batch_size=8, mini_batch_size=8, micro_batch_size=8, response_length=6, use_vllm=True
)
ENDS = [2, 9, 10, 11]
PARAMS = Params().model_copy(update={"ppo": PPO})
PROMPTS = [[5 + i, 6, 7][: 1 + i % 3] for i in range(8)]


class StandIn:
    """The part of vllm.LLM that TRL uses, with a model of transformers."""

    def __init__(self, model, **options):
        self.options, self.model = options, AutoModelForCausalLM.from_pretrained(model).eval()
        self.resets, self.seed = 0, 0
        self.error = 0.0  # of its log-probabilities
        assert options["max_model_len"] == 64 + 6 and options["logprobs_mode"].startswith("proc")
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def load_weights(self, weights):
        with torch.no_grad():
            for name, weight in weights:
                self.model.get_parameter(name).copy_(weight)

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, sampling_params, use_tqdm):
        assert sampling_params.n == 1
        assert sampling_params.top_p == 1.0 and sampling_params.top_k == 0
        assert sampling_params.ignore_eos
        # a seed would be the same for every prompt
        assert not hasattr(sampling_params, "seed")
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        ends = sampling_params.stop_token_ids
        assert sampling_params.logprobs == 0
        self.seed += 1
        responses = sample(
            self.model,
            ids,
            sampling_params.max_tokens,
            sampling_params.temperature,
            self.seed,
            ends,
        )
        logprobs = token_logprobs(self.model, ids, responses)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt,
                outputs=[
                    SimpleNamespace(
                        token_ids=tuple(response),
                        logprobs=[
                            {token: SimpleNamespace(logprob=value + self.error, rank=1)}
                            for token, value in zip(response, row.tolist(), strict=True)
                        ],
                    )
                ],
            )
            for prompt, response, row in zip(ids, responses, logprobs, strict=True)
        ]


def sample(model, ids, length, temperature, seed, ends):
    generator = torch.Generator().manual_seed(seed)
    return generate(
        model,
        ids,
        response_length=length,
        temperature=temperature,
        generator=generator,
        ends=EndTokens(ends[0], tuple(ends[1:])),
    )


@pytest.fixture
def vllm(monkeypatch):
    """VllmEngine as on a machine that has vLLM."""
    from trl.generation import vllm_generation

    import stages.ppo.trainer.vllm as vllm_module

    for module in (vllm_generation, vllm_module):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", StandIn, raising=False)
    monkeypatch.setattr(
        vllm_generation,
        "SamplingParams",
        lambda **options: SimpleNamespace(**options),
        raising=False,
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    # TRL sets these variables; monkeypatch removes them again after the test
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    return vllm_module.VllmEngine


@pytest.fixture
def roles(make_roles, shift, tiny_lm, tmp_path, vllm):
    """A policy whose adapters are not zero, on a model that vLLM can load from disk."""
    roles = make_roles(lora=LoraParams(r=4, top_layers=1))
    tiny_lm(spread=0.3).save_pretrained(tmp_path)
    roles.policy.get_base_model().name_or_path = str(tmp_path)
    roles.policy.generation_config.eos_token_id = ENDS
    shift(roles.policy, 0.1)
    roles.engine = vllm(roles.policy, roles.tokenizer, PARAMS)
    return roles


def test_it_samples_from_the_current_policy(roles, shift):
    before = {name: weight.clone() for name, weight in roles.policy.state_dict().items()}
    sampled = []
    for seed in (1, 2):
        responses = roles.sample(PROMPTS, PPO, torch.Generator())
        assert responses == sample(roles.policy, PROMPTS, 6, 1.0, seed, ENDS)
        sampled.append(responses)
        assert all(
            torch.equal(weight, before[name]) for name, weight in roles.policy.state_dict().items()
        )
        shift(roles.policy, 0.5)
        before = {name: weight.clone() for name, weight in roles.policy.state_dict().items()}
    assert sampled[0] != sampled[1]
    engine = roles.engine.generation.llm
    assert engine.resets == 2 and engine.options["gpu_memory_utilization"] == 0.3


@pytest.fixture
def trainer(roles):
    prompts = [({"id": str(i), "prompt": ""}, prompt) for i, prompt in enumerate(PROMPTS)]
    trainer = PpoTrainer(roles, prompts, PPO, seed=0)
    trainer.updates = 1  # before the first update, policy and reference would have to agree
    return trainer


def test_an_update_on_its_samples(roles, trainer):
    before = copy.deepcopy(roles.policy)
    rollout, metrics = trainer.step()
    assert metrics["sampler_log_ratio"] == pytest.approx(0.0, abs=1e-5)
    assert rollout.responses == sample(before, rollout.prompts, 6, 1.0, 1, ENDS)
    after = roles.sample(PROMPTS, PPO, torch.Generator())
    assert after == sample(roles.policy, PROMPTS, 6, 1.0, 2, ENDS)


@pytest.mark.parametrize("error", [0.05, -0.05])
def test_how_far_its_log_probabilities_are_off_is_a_metric(roles, trainer, error):
    roles.engine.generation.llm.error = error
    assert trainer.step()[1]["sampler_log_ratio"] == pytest.approx(0.05, abs=1e-5)


@pytest.mark.parametrize("error", [0.11, -0.11, math.nan])
def test_log_probabilities_of_another_policy_stop_training(roles, trainer, error):
    roles.engine.generation.llm.error = error
    before = copy.deepcopy(roles.policy.state_dict())
    with pytest.raises(RondoError, match=r"differ by (0\.11|nan) nats per token"):
        trainer.step()
    assert all(torch.equal(weight, before[n]) for n, weight in roles.policy.state_dict().items())


def test_stale_weights_stop_training(roles, trainer, monkeypatch):
    monkeypatch.setattr(roles.engine.generation.llm, "load_weights", lambda weights: list(weights))
    with pytest.raises(RondoError, match="check that vLLM received all weights"):
        trainer.step()


def test_without_vllm_the_next_step_is_named(roles, vllm, monkeypatch):
    monkeypatch.setattr("stages.ppo.trainer.vllm.is_vllm_available", lambda: False)
    with pytest.raises(BadInput, match=r"pip install 'trl\[vllm\]'"):
        vllm(roles.policy, roles.tokenizer, PARAMS)
