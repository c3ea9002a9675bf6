"""Settings that OpenRLHF cannot honour are refused before a run, each with the value to set."""

from typing import Any

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params, openrlhf
from tests.engine_settings import NEEDED

LAUNCHER = {"ray_address": "http://ray:8265"}


def check(launcher: dict[str, Any] = LAUNCHER, algorithm: str = "ppo", **ppo: Any) -> Params:
    values = {
        "launcher": launcher,
        "algorithm": algorithm,
        "ppo": NEEDED | {"micro_batch_size": 4} | ppo,
    }
    return check_params(values, "test")


def test_the_defaults_are_refused_with_every_value_to_set():
    with pytest.raises(BadInput) as refusal:
        check_params({"ppo": {"engine": "openrlhf"}}, "test")
    assert str(refusal.value) == (
        'test: ppo: Value error, engine openrlhf needs ppo.init_from="sft", '
        'ppo.kl_control="fixed", ppo.lora.r=0, ppo.critic_lora.r=0, ppo.missing_eos_penalty=0.0 '
        "(docs/engines.md says why; `--preset openrlhf` sets all of them)"
    )
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic", "policy"),
        ("init_from", "champion"),
        ("kl_control", "adaptive"),
        ("length_penalty", 0.1),
        ("loss_level", "sequence"),
        ("lora", {"r": 8}),
        ("critic_lora", {"r": 8}),
        ("missing_eos_penalty", 0.3),
        ("reward_weight", 0.5),
        ("rewards", [{"name": "more", "function": "rewards:more"}]),
        ("whiten_rewards", True),
        ("kl_coef", 0.0),
    ],
)
def test_a_setting_that_the_engine_lacks_is_named(key, value):
    name = f"{key}.r" if "lora" in key else key
    with pytest.raises(BadInput, match=rf"engine openrlhf needs ppo\.{name}[= ]"):
        check(**{key: value})


def test_a_served_reward_model_is_refused():
    url = "http://rewards:8000/get_reward"
    with pytest.raises(BadInput, match="reward_url"):
        check(reward_url=url, critic="policy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ds.zero_stag": 2}, r"no such option: did you mean ds\.zero_stage\?"),
        ({"--ds.zero_stage": 2}, r"did you mean ds\.zero_stage\?"),
        ({"actor.adam.lr": 1e-6}, r"actor\.adam\.lr: ppo\.learning_rate sets it; remove it here"),
        ({"ds.zero_stage": 2.5}, r"ds\.zero_stage: expected a value of type int, got 2\.5"),
        ({"ds.zero_stage": True}, "expected a value of type int, got True"),
        ({"ds.zero_stage": [2]}, "expected a value of type int"),
        ({"ds.overlap_comm": 1}, "expected a value of type bool, got 1"),
        ({"ds.param_dtype": "fp32"}, "expected one of bf16, fp16, got 'fp32'"),
        ({"actor.adam.betas": [0.9]}, "expected a list of 2 of type float"),
        ({"actor.adam.betas": 0.9}, "expected a list of 2 of type float"),
        ({"ds.lora.target_modules": [1]}, "expected a list of at least 0 of type str"),
    ],
)
def test_an_option_that_the_engine_would_misread_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check(engine_options=options)


def test_numbers_and_lists_of_the_right_type_are_taken():
    for options in (
        {"actor.adam.betas": [0.9, 1], "ds.lora.target_modules": []},
        {"actor.adam.eps": 1, "ds.param_dtype": "fp16", "ds.overlap_comm": True},
    ):
        assert check(engine_options=options).ppo.engine_options == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor.num_gpus_per_node": 4}, "actor has 4 GPUs and ref 8, but they share them"),
        (
            {"vllm.num_engines": 4},
            r"is 4, but must be the number of GPUs, 8, if train\.colocate_all",
        ),
        ({"vllm.num_engines": 9}, "is 9, but must be the number of GPUs, 8"),
        ({"vllm.tensor_parallel_size": 3}, "is 6, but must be the number of GPUs, 8"),
        (
            {"train.colocate_all": False, "train.colocate_critic_reward": True}
            | {"critic.num_gpus_per_node": 4},
            "critic has 4 GPUs and reward 8",
        ),
        (
            {"train.colocate_all": False, "critic.num_gpus_per_node": 3},
            "must be a multiple of ppo.micro_batch_size 4 times the 3 data-parallel workers of the "
            "critic",
        ),
        ({"ds.ring_attn_size": 0}, r"ds\.ring_attn_size: expected 1 or more, got 0"),
        ({"ds.attn_implementation": "eager"}, r"set ds\.packing_samples to false"),
    ],
)
def test_numbers_of_gpus_that_do_not_fit_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check(engine_options=options)


def test_gpus_that_fit_are_taken():
    apart = {"train.colocate_all": False, "vllm.num_engines": 4, "critic.num_gpus_per_node": 4}
    check(engine_options=apart)
    check(engine_options={"vllm.tensor_parallel_size": 4})
    check(engine_options={"ds.ring_attn_size": 2}, micro_batch_size=8)
    check(LAUNCHER | {"nodes": 2, "gpus_per_node": 4})
    eager = {"ds.attn_implementation": "eager", "ds.packing_samples": False}
    check(engine_options=eager)
    with pytest.raises(BadInput, match=r"ppo\.mini_batch_size 32 must be a multiple of .* 4 times"):
        check(LAUNCHER | {"nodes": 3})


def test_models_share_all_gpus_by_default():
    placed = openrlhf.placement(2, 4, {"vllm.tensor_parallel_size": 2})
    assert (placed["actor.num_nodes"], placed["actor.num_gpus_per_node"]) == (2, 4)
    assert placed["vllm.num_engines"] == 4


def test_an_engine_needs_a_cluster_and_ppo():
    with pytest.raises(BadInput, match=r"set launcher\.ray_address to the Ray cluster's dashboard"):
        check(launcher={})
    with pytest.raises(BadInput, match="algorithm is rloo, which Rondo trains itself"):
        check(algorithm="rloo")
    with pytest.raises(BadInput, match="engine is local, which has none"):
        check_params({"ppo": {"engine_options": {"ds.zero_stage": 2}}}, "test")


def test_one_process_follows_an_engine():
    params = check(LAUNCHER | {"processes": 4})
    assert (params.processes("ppo"), params.processes("sft")) == (1, 4)
