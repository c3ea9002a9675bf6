"""Settings that an engine cannot honour are refused before a run, each with the value to set."""

from typing import Any

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.openrlhf import OPENRLHF
from stages.lib.core.params.verl import VERL
from tests import engine_settings
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


def test_an_engine_shards_by_its_own_options():
    with pytest.raises(BadInput, match=r"launcher.shard needs ppo.engine local \(got openrlhf\)"):
        check(LAUNCHER | {"shard": True, "processes": 2})


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
    placed = OPENRLHF.placement(2, 4, {"vllm.tensor_parallel_size": 2})
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


def check_verl(launcher: dict[str, Any] = LAUNCHER, **ppo: Any) -> Params:
    section = engine_settings.VERL | {"micro_batch_size": 4} | ppo
    return check_params({"launcher": launcher, "ppo": section}, "test")


def test_verl_needs_other_values():
    with pytest.raises(BadInput) as refusal:
        check_params({"ppo": {"engine": "verl", "kl_coef": 0.0, "kl_control": "fixed"}}, "test")
    assert str(refusal.value) == (
        'test: ppo: Value error, engine verl needs ppo.init_from="sft", ppo.lora.r=0, '
        "ppo.critic_lora.r=0, ppo.kl_coef above 0 (docs/engines.md says why; `--preset openrlhf` "
        "sets all of them)"
    )
    for key, value in (
        ("critic", "policy"),
        ("kl_control", "adaptive"),
        ("loss_level", "sequence"),
        ("reward_weight", 0.5),
        ("rewards", [{"name": "more", "function": "rewards:more"}]),
        ("whiten_rewards", True),
    ):
        with pytest.raises(BadInput, match=rf"engine verl needs ppo\.{key}="):
            check_verl(**{key: value})
    check_verl(missing_eos_penalty=0.3, length_penalty=0.1)  # unlike OpenRLHF
    assert set(VERL.required) < set(OPENRLHF.required)  # so that the preset has them all


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic.fsdp.param_ofload": True}, r"did you mean critic\.fsdp\.param_offload\?"),
        # near is reward_model.rollout.tensor_model_parallel_size, but nobody may set that
        ({"vllm.tensor_parallel_size": 2}, r"verl 0\.9\.1 has no such option \(names"),
        ({"gpu_memory_utilization": 0.5}, rf"did you mean {ROLLOUT}\.gpu_memory_utilization\?"),
        ({f"{ACTOR}.optim.lr": 1e-6}, r"ppo\.learning_rate sets it; remove it here"),
        ({f"{ACTOR}.checkpoint.async_save": True}, "Rondo sets it"),
        ({"trainer.resume_mode": "auto"}, "Rondo sets it, or needs it as it is; remove it here"),
        ({"data.shuffle": True}, "Rondo sets it"),
        ({"algorithm.adv_estimator": "grpo"}, "Rondo sets it"),
        ({"reward_model.enable": True}, "Rondo sets it"),
        (
            {"critic.ulysses_sequence_parallel_size": 2},
            r"critic\.fsdp\.ulysses_sequence_parallel_size sets it",
        ),
        ({f"{ROLLOUT}.engine_kwargs.vllm": 1}, "expected no value: set the keys below it"),
        ({f"{ROLLOUT}.max_num_seqs": 1.5}, r"expected a value of type int, got 1\.5"),
        ({f"{ROLLOUT}.max_num_seqs": True}, "expected a value of type int, got True"),
        ({f"{ROLLOUT}.gpu_memory_utilization": "much"}, "expected a value of type float"),
        ({f"{ROLLOUT}.enforce_eager": 1}, "expected a value of type bool, got 1"),
        ({f"{ROLLOUT}.dtype": 16}, "expected a value of type str, got 16"),
        ({f"{ACTOR}.optim.betas": 0.9}, "expected a list, got 0.9"),
        ({"critic.strategy": "megatron"}, "expected one of fsdp, fsdp2, got 'megatron'"),
    ],
)
def test_an_option_that_verl_would_misread_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check_verl(engine_options=options)


def test_options_that_verl_reads_are_taken():
    options = {
        "trainer.critic_warmup": 5,
        "trainer.device": "cpu",
        "data.dataloader_num_workers": 2,
        "reward.num_workers": 4,
        "algorithm.rollout_correction.rollout_is": "token",  # null by default
        f"{ROLLOUT}.over_sample_rate": 0.5,
        f"{ROLLOUT}.gpu_memory_utilization": 1,
        f"{ACTOR}.optim.betas": [0.9, 0.95],
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.clip_ratio_c": 10,
    }
    assert check_verl(engine_options=options).ppo.engine_options == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "is 3, which must divide the number of GP"),
        (
            {"reward.reward_model.rollout.tensor_model_parallel_size": 4}
            | {"reward.reward_model.rollout.data_parallel_size": 4},
            r"reward\.reward_model\.rollout\..* is 16, which must divide .*, 8",
        ),
        ({f"{ROLLOUT}.data_parallel_size": 0}, "data_parallel_size: expected 1 or more"),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 3},
            "ulysses_sequence_parallel_size 3 must divide the number of GPUs, 8",
        ),
        ({"critic.fsdp.ulysses_sequence_parallel_size": 0}, "must divide the number of GPUs, 8"),
    ],
)
def test_numbers_of_gpus_that_verl_cannot_use_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check_verl(engine_options=options)


def test_batches_that_do_not_fit_verls_gpus_are_refused():
    check_verl(LAUNCHER | {"nodes": 2, "gpus_per_node": 4})
    check_verl(
        micro_batch_size=16,
        engine_options={
            f"{ACTOR}.ulysses_sequence_parallel_size": 4,
            "critic.fsdp.ulysses_sequence_parallel_size": 4,
        },
    )
    with pytest.raises(BadInput, match=r"ppo\.batch_size 32 must be a multiple of .* GPUs, 24"):
        check_verl(LAUNCHER | {"nodes": 3})
    with pytest.raises(BadInput, match="4 times the 8 data-parallel workers of the critic"):
        check_verl(
            mini_batch_size=16, engine_options={f"{ACTOR}.ulysses_sequence_parallel_size": 2}
        )
    with pytest.raises(BadInput, match="8 times the 8 data-parallel workers of the actor"):
        check_verl(micro_batch_size=8)
