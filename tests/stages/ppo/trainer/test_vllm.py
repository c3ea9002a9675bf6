"""PPO's rollouts and validations by VllmEngine, with a stand-in for vLLM itself."""

import copy
import math

import pytest
import torch

from stages.lib.core.errors import RondoError
from stages.lib.core.params.policy import LossLevel, PpoParams
from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.lm.vllm_engine import VllmEngine
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.lib.lm import vllm_stand_in

PPO = PpoParams(batch_size=8, mini_batch_size=8, micro_batch_size=8, response_length=6)
ENDS = [2, 9, 10, 11]
PROMPTS = [[5 + i, 6, 7][: 1 + i % 3] for i in range(8)]


@pytest.fixture
def vllm(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


@pytest.fixture
def roles(make_roles, shift, tiny_lm, tmp_path, vllm):
    """A policy whose adapters are not zero, on a model that vLLM can load from disk."""
    roles = make_roles(lora=LoraParams(r=4, top_layers=1))
    tiny_lm(spread=0.3).save_pretrained(tmp_path)
    roles.policy.get_base_model().name_or_path = str(tmp_path)
    roles.policy.generation_config.eos_token_id = ENDS
    shift(roles.policy, 0.1)
    roles.engine = VllmEngine(ModelParams(use_vllm=True))
    return roles


@pytest.fixture
def trainer(roles):
    return start(roles)


def start(roles):
    prompts = [({"id": str(i), "prompt": ""}, prompt) for i, prompt in enumerate(PROMPTS)]
    trainer = PpoTrainer(roles, prompts, PPO, seed=0)
    trainer.updates = 1  # before the first update, policy and reference would have to agree
    return trainer


def by(policy, prompts, requests):
    """The responses to requests that the stand-in received, by this policy."""
    return [
        vllm_stand_in.sample(policy, [prompt], 6, 1.0, params.seed, ENDS)[0]
        for prompt, (params, _) in zip(prompts, requests, strict=True)
    ]


def tokens_of(responses):
    return [response.tokens for response in responses]


def test_an_update_on_its_samples(vllm, roles, trainer):
    before = copy.deepcopy(roles.policy)
    rollout, metrics = trainer.step()
    [llm] = vllm.engines
    assert metrics["sampler_log_ratio"] == pytest.approx(0.0, abs=1e-5)
    prompts = [response.prompt_ids for response in rollout.responses]
    assert tokens_of(rollout.responses) == by(before, prompts, llm.requests)
    after = roles.sample(PROMPTS, PPO, torch.Generator().manual_seed(0))
    assert tokens_of(after) == by(roles.policy, PROMPTS, llm.requests[8:])


@pytest.mark.parametrize("error", [0.005, -0.005])
def test_how_far_its_log_probabilities_are_off_is_a_metric(vllm, trainer, error):
    trainer.step()
    vllm.engines[0].error = error
    assert trainer.step()[1]["sampler_log_ratio"] == pytest.approx(0.005, abs=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_weighs_samples_of_a_sampler_that_is_off(vllm, roles, trainer, level):
    """log p - log p_engine is -0.005 per token; the most is 1."""
    losses = {}
    for error in (0.0, 0.005, -0.005):
        params = PPO.model_copy(
            update={
                "loss_level": LossLevel(level),
                "vllm_importance_sampling_clip_max": 1.0,
                "mini_batch_size": 1,
                "micro_batch_size": 1,
            }
        )
        trainer = PpoTrainer(roles, trainer.prompts, params, seed=0)
        trainer.sample_prompts()
        roles.sample(PROMPTS, PPO, torch.Generator())
        vllm.engines[0].error = error
        rollout = trainer.rollout(trainer.sample_prompts())
        trainer.optimizers["policy"].step = lambda: None
        trainer.optimizers["critic"].step = lambda: None
        losses[error] = [trainer.optimizer_step(rollout, [i])["policy_loss"] for i in range(8)]
    lengths = rollout.mask.sum(1).tolist()
    for i, length in enumerate(lengths):
        steps = 1 if level == "token" else length
        assert losses[0.005][i] == pytest.approx(
            losses[0.0][i] * math.exp(-0.005 * steps), rel=1e-4
        )
        assert losses[-0.005][i] == pytest.approx(losses[0.0][i], rel=1e-4)


@pytest.mark.parametrize("error", [0.11, -0.11, 0.03, math.nan])
def test_log_probabilities_of_another_policy_stop_training(vllm, roles, trainer, error):
    roles.sample(PROMPTS, PPO, torch.Generator())  # afterwards nothing new is sent
    vllm.engines[0].error = error
    before = copy.deepcopy(roles.policy.state_dict())
    with pytest.raises(RondoError, match=r"differ by (0\.11|0\.03|nan) nats per token"):
        trainer.step()
    assert all(torch.equal(weight, before[n]) for n, weight in roles.policy.state_dict().items())


def test_a_resumed_run_does_not_repeat_its_random_numbers(vllm, roles, trainer):
    trainer.step()
    state, weights = copy.deepcopy((trainer.state(), roles.policy.state_dict()))
    rollout, _ = trainer.step()
    # as in a new process: another engine, and a trainer that loads the state
    roles.policy.load_state_dict(weights)
    roles.engine = VllmEngine(ModelParams(use_vllm=True))
    resumed = start(roles)
    resumed.load_state(state)
    again, _ = resumed.step()
    seeds = [[params.seed for params, _ in llm.requests] for llm in vllm.engines]
    assert seeds[1] == seeds[0][8:] != seeds[0][:8]
    assert again.responses == rollout.responses


def test_the_critic_is_fitted_to_samples_that_are_not_the_last(vllm, roles, trainer):
    """An engine knows the log-probabilities of its last samples alone."""
    trainer.updates = 0
    first = roles.sample(PROMPTS, PPO, torch.Generator().manual_seed(0))
    roles.sample(PROMPTS[:3], PPO, torch.Generator().manual_seed(1))
    trainer.fit_critic(trainer.prompts, first)
    trainer.updates = 1
    assert trainer.step()[1]["sampler_log_ratio"] == pytest.approx(0.0, abs=1e-5)
