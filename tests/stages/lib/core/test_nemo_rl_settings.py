"""What is refused before a run if NeMo RL trains."""

from typing import Any

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.nemo_rl import NEMO_RL
from stages.lib.core.params.openrlhf import OPENRLHF
from stages.lib.core.params.policy import PpoParams
from tests import engine_settings

LAUNCHER = {"ray_address": "http://ray:8265", "gpus_per_node": 16}
VLLM, REWARD = "policy.generation.vllm_cfg", "env.reward_model"


def check(launcher: dict[str, Any] = LAUNCHER, **ppo: Any) -> Params:
    section = engine_settings.NEMO_RL | {"micro_batch_size": 4} | ppo
    return check_params({"launcher": launcher, "ppo": section}, "test")


def test_the_preset_and_the_defaults_have_all_that_nemo_rl_needs():
    further = NEMO_RL.required.keys() - OPENRLHF.required.keys()
    assert {name: getattr(PpoParams(), name) for name in further} == {"entropy_coef": 0.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic", "policy"),
        ("kl_control", "adaptive"),
        ("init_from", "champion"),
        ("loss_level", "sequence"),
        ("whiten_rewards", True),
        ("entropy_coef", 0.01),
        ("length_penalty", 0.1),
        ("missing_eos_penalty", 0.3),
    ],
)
def test_what_nemo_rl_cannot_do_is_refused(key, value):
    with pytest.raises(BadInput, match=rf"engine nemo_rl needs ppo\.{key}="):
        check(**{key: value})


def test_a_kl_of_0_is_refused():
    with pytest.raises(BadInput, match=r"engine nemo_rl needs ppo\.kl_coef above 0"):
        check(kl_coef=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy.precison": "float32"}, r"did you mean policy\.precision\?"),
        ({"vllm.tensor_parallel_size": 2}, r"NeMo RL 0\.7\.0 has no such option"),
        ({"ppo.adv_estimator.gae_lamda": 0.9}, r"has no such option"),
        # its own config takes keys that it never reads
        ({"grpo.num_prompts_per_step": 8}, r"has no such option"),
        ({"policy.optimizer.kwargs.lr": 1e-6}, r"ppo\.learning_rate sets it; remove it here"),
        ({"loss_fn.use_kl_in_reward": False}, "Rondo sets it"),
        ({"loss_fn.reference_policy_kl_penalty": 0.0}, r"ppo\.kl_coef sets it"),
        ({"loss_fn.kl_output_clamp_value": 1.0}, "Rondo sets it"),
        ({"ppo.skip_reference_policy_logprobs_calculation": True}, "Rondo sets it"),
        ({"ppo.reward_scaling.enabled": False}, r"ppo\.score_clip sets it"),
        ({"ppo.reward_shaping.enabled": True}, "Rondo sets it"),
        ({"ppo.overlong_filtering": True}, "Rondo sets it"),
        ({"ppo.num_generations_per_prompt": 4}, "Rondo sets it"),
        ({"value.model_name": "policy"}, r"ppo\.critic sets it"),
        ({"value.reward_model_cfg.enabled": False}, "Rondo sets it"),
        ({"checkpointing.keep_top_k": 3}, "Rondo sets it"),
        ({"checkpointing.checkpoint_dir": "results"}, "Rondo sets it"),
        ({"checkpointing.model_save_format": "safetensors"}, "Rondo sets it"),
        ({"policy.dtensor_cfg._v2": False}, "Rondo sets it"),
        ({"policy.megatron_cfg.enabled": True}, "Rondo sets it"),
        ({"policy.dtensor_cfg.lora_cfg.enabled": True}, r"ppo\.lora sets it"),
        ({"policy.generation.top_p": 0.9}, "Rondo sets it"),
        ({f"{VLLM}.async_engine": True}, "Rondo sets it"),
        ({"value.dtensor_cfg.context_parallel_size": 2}, "Rondo sets it"),
        ({"data.shuffle": True}, "Rondo sets it"),
        ({"env.math.num_workers": 2}, "Rondo sets it"),
        ({f"{REWARD}.reward_model_cfg.enabled": False}, "Rondo sets it"),
        ({"cluster.num_nodes": 2}, r"launcher\.nodes sets it"),
        ({f"{VLLM}.gpu_memory_utilization": "much"}, "expected a value of type float"),
        ({f"{VLLM}.tensor_parallel_size": 1.5}, "expected a value of type int, got 1.5"),
        ({f"{VLLM}.tensor_parallel_size": True}, "expected a value of type int, got True"),
        ({f"{VLLM}.enforce_eager": 1}, "expected a value of type bool, got 1"),
        ({"policy.precision": 16}, "expected a value of type str, got 16"),
        ({"policy.optimizer.kwargs.betas": 0.9}, "expected a list, got 0.9"),
    ],
)
def test_an_option_that_nemo_rl_would_misread_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        check(engine_options=options)


def test_options_that_nemo_rl_reads_are_taken():
    options = {
        "ppo.policy_training_start_step": 5,
        "data.num_workers": 2,
        "logger.monitor_gpus": True,
        "logger.gpu_monitoring.flush_interval": 2.5,
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "tis",  # null by default
        "policy.sequence_packing.enabled": False,
        "policy.dtensor_cfg.context_parallel_size": 2,
        "policy.dtensor_cfg.cpu_offload": True,
        "policy.optimizer.kwargs.betas": [0.9, 0.95],
        f"{VLLM}.gpu_memory_utilization": 1,
        f"{REWARD}.precision": "float32",
    }
    assert check(engine_options=options).ppo.engine_options == options


def test_the_reward_model_has_half_of_one_node_or_a_node_of_many():
    resources = f"{REWARD}.resources"
    for nodes, gpus in ((1, 4), (2, 8)):
        placed = NEMO_RL.placement(nodes, 8, {})
        assert placed[f"{resources}.num_nodes"] == 1
        assert placed[f"{resources}.gpus_per_node"] == gpus
    placed = NEMO_RL.placement(1, 8, {f"{resources}.gpus_per_node": 2})
    assert placed[f"{resources}.gpus_per_node"] == 2


@pytest.mark.parametrize(
    ("launcher", "options", "message"),
    [
        ({"gpus_per_node": 1}, {}, r"1 x 1 GPUs of its own .* none of 1 x 1 for the policy"),
        ({}, {f"{REWARD}.resources.num_nodes": 2}, "2 x 8 GPUs of its own"),
        ({}, {f"{REWARD}.resources.gpus_per_node": 16}, "leaves none of 1 x 16"),
        ({"nodes": 2}, {f"{REWARD}.resources.num_nodes": 2}, "leaves none of 2 x 16"),
        ({"nodes": 2}, {f"{REWARD}.resources.gpus_per_node": 17}, "leaves none of 2 x 16"),
        ({}, {f"{REWARD}.resources.gpus_per_node": 0}, "expected 1 or more, got 0"),
        ({}, {f"{VLLM}.tensor_parallel_size": 3}, "is 3, which must divide .* GPUs, 8"),
        ({}, {f"{VLLM}.pipeline_parallel_size": 0}, "expected 1 or more, got 0"),
        ({}, {"policy.dtensor_cfg.tensor_parallel_size": 3}, "is 3, which must divide .*, 8"),
        ({}, {"value.dtensor_cfg.tensor_parallel_size": 16}, "is 16, which must divide .*, 8"),
        ({}, {f"{REWARD}.dtensor_cfg.tensor_parallel_size": 3}, "is 3, which must divide .*, 8"),
        (
            {},
            {"policy.dtensor_cfg.context_parallel_size": 2},
            r"needs policy\.sequence_packing\.enabled: false",
        ),
        (
            {"gpus_per_node": 2},
            {"value.dtensor_cfg.cpu_offload": True},
            r"value\.dtensor_cfg\.cpu_offload needs two GPUs",
        ),
    ],
)
def test_numbers_of_gpus_that_nemo_rl_cannot_use_are_refused(launcher, options, message):
    with pytest.raises(BadInput, match=message):
        check(LAUNCHER | launcher, engine_options=options)


def test_batches_that_do_not_fit_the_gpus_are_refused():
    check(LAUNCHER | {"nodes": 2, "gpus_per_node": 8})
    roles = ("policy", "value", REWARD)
    parallel = {f"{role}.dtensor_cfg.tensor_parallel_size": 2 for role in roles}
    check(micro_batch_size=8, engine_options=parallel)
    with pytest.raises(BadInput, match="8 times the 8 data-parallel workers of the policy"):
        check(micro_batch_size=8)
    with pytest.raises(BadInput, match="4 times the 32 data-parallel workers of the policy"):
        check(LAUNCHER | {"nodes": 3})  # two of them
    del parallel["value.dtensor_cfg.tensor_parallel_size"]
    with pytest.raises(BadInput, match="8 times the 8 data-parallel workers of the critic"):
        check(micro_batch_size=8, engine_options=parallel)
    many = {f"{REWARD}.resources.gpus_per_node": 16}  # leaves 4
    with pytest.raises(BadInput, match=r"batch_size 32 .* 4 times the 16 .* of the reward model"):
        check(LAUNCHER | {"gpus_per_node": 20}, engine_options=many)
