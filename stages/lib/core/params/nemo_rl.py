"""NeMo RL as the engine of PPO: what it cannot do, and the keys of its config.

nemo_rl.json has the keys with their defaults, of the recipe for PPO and of the reward model in that
for GRPO (tests/stages/ppo/engines/nemo_rl_config.py). NeMo RL takes any key, and checks few types.
"""

from typing import Any

from stages.lib.core.params.engine_settings import (
    REQUIRED,
    EngineSettings,
    Options,
    Value,
    check_workers,
    unlike_default,
)

REWARD = "env.reward_model"
REWARD_NODES = f"{REWARD}.resources.num_nodes"
REWARD_GPUS = f"{REWARD}.resources.gpus_per_node"
VLLM = "policy.generation.vllm_cfg"

SET_BY = {
    "checkpointing": "Rondo",
    "checkpointing.save_period": "ppo.validation_updates",
    "cluster.gpus_per_node": "launcher.gpus_per_node",
    "cluster.num_nodes": "launcher.nodes",
    "data": "Rondo",
    "data.max_input_seq_length": "prepare.max_prompt_tokens",
    "data.num_workers": "",
    "env": "Rondo",
    f"{REWARD}.batch_size": "ppo.micro_batch_size",
    f"{REWARD}.dtensor_cfg.custom_parallel_plan": "",
    f"{REWARD}.dtensor_cfg.sequence_parallel": "",
    f"{REWARD}.dtensor_cfg.tensor_parallel_size": "",
    f"{REWARD}.precision": "",
    f"{REWARD}.resources": "",
    "logger": "Rondo",
    "logger.gpu_monitoring": "",
    "logger.monitor_gpus": "",
    "loss_fn": "Rondo",
    "loss_fn.ratio_clip_max": "ppo.cliprange",
    "loss_fn.ratio_clip_min": "ppo.cliprange",
    "loss_fn.reference_policy_kl_penalty": "ppo.kl_coef",
    "loss_fn.token_level_loss": "ppo.loss_level",
    "loss_fn.truncated_importance_sampling_ratio": "",
    "loss_fn.truncated_importance_sampling_ratio_min": "",
    "loss_fn.truncated_importance_sampling_type": "",
    "loss_fn.use_importance_sampling_correction": "",
    "policy.dtensor_cfg._v2": "Rondo",
    "policy.dtensor_cfg.activation_checkpointing": "ppo.gradient_checkpointing",
    "policy.dtensor_cfg.enabled": "Rondo",
    "policy.dtensor_cfg.lora_cfg": "ppo.lora",
    "policy.dynamic_batching": "Rondo",
    "policy.generation": "Rondo",
    "policy.generation.max_new_tokens": "ppo.response_length",
    "policy.generation.temperature": "ppo.temperature",
    VLLM: "",
    f"{VLLM}.async_engine": "Rondo",
    f"{VLLM}.max_model_len": "ppo.response_length and prepare.max_prompt_tokens",
    "policy.hf_config_overrides": "Rondo",
    "policy.logprob_batch_size": "ppo.micro_batch_size",
    "policy.make_sequence_length_divisible_by": "Rondo",
    "policy.max_grad_norm": "ppo.max_grad_norm",
    "policy.max_total_sequence_length": "ppo.response_length and prepare.max_prompt_tokens",
    "policy.megatron_cfg": "Rondo",
    "policy.model_name": "Rondo",
    "policy.optimizer.kwargs.lr": "ppo.learning_rate",
    "policy.scheduler": "ppo.warmup_updates",
    "policy.tokenizer": "Rondo",
    "policy.train_global_batch_size": "ppo.mini_batch_size",
    "policy.train_micro_batch_size": "ppo.micro_batch_size",
    "ppo": "Rondo",
    "ppo.adv_estimator.gae_gamma": "ppo.gamma",
    "ppo.adv_estimator.gae_lambda": "ppo.lam",
    "ppo.max_num_steps": "ppo.total_episodes",
    "ppo.num_prompts_per_step": "ppo.batch_size",
    "ppo.policy_training_start_step": "",
    "ppo.ppo_epochs": "ppo.num_ppo_epochs",
    "ppo.reward_scaling": "ppo.score_clip",
    "ppo.seed": "seed",
    "value.dtensor_cfg._v2": "Rondo",
    "value.dtensor_cfg.activation_checkpointing": "ppo.gradient_checkpointing",
    "value.dtensor_cfg.context_parallel_size": "Rondo",  # NeMo RL has no other value for a critic
    "value.dtensor_cfg.enabled": "Rondo",
    "value.dtensor_cfg.lora_cfg": "ppo.critic_lora",
    "value.dynamic_batching": "Rondo",
    "value.hf_config_overrides": "Rondo",
    "value.make_sequence_length_divisible_by": "Rondo",
    "value.max_grad_norm": "ppo.max_grad_norm",
    "value.max_total_sequence_length": "ppo.response_length and prepare.max_prompt_tokens",
    "value.megatron_cfg": "Rondo",
    "value.model_name": "ppo.critic",
    "value.optimizer.kwargs.lr": "ppo.critic_learning_rate",
    "value.reward_model_cfg": "Rondo",
    "value.scheduler": "ppo.warmup_updates",
    "value.sequence_packing": "Rondo",
    "value.tokenizer": "Rondo",
    "value.train_global_batch_size": "ppo.mini_batch_size",
    "value.train_micro_batch_size": "ppo.micro_batch_size",
    "value_loss_fn": "Rondo",
    "value_loss_fn.cliprange": "ppo.cliprange_value",
}

# whose default is a whole number
FRACTIONS = (
    "logger.gpu_monitoring.collection_interval",
    "logger.gpu_monitoring.flush_interval",
    "ppo.adv_estimator.gae_gamma",
)


class NemoRlSettings(EngineSettings):
    name, title, recorded = "nemo_rl", "NeMo RL", "nemo_rl.json"
    # it has neither an entropy bonus nor an adaptive KL, and no penalties of these forms
    required = REQUIRED | {"entropy_coef": 0.0, "length_penalty": 0.0, "missing_eos_penalty": 0.0}
    set_by = SET_BY

    def mistake(self, name: str, value: Value | list[Value]) -> str:
        return unlike_default(self.options[name], value, whole=name not in FRACTIONS)

    def placement(self, nodes: int, gpus_per_node: int, options: Options) -> Options:
        """Policy, critic and vLLM take turns; the reward model has GPUs of its own: half of a
        single node, so that batches can be divided among the others, or one of several nodes.
        """
        apart: Options = {
            "cluster.num_nodes": nodes,
            "cluster.gpus_per_node": gpus_per_node,
            REWARD_NODES: 1,
            REWARD_GPUS: max(gpus_per_node // 2, 1) if nodes == 1 else gpus_per_node,
        }
        return apart | options

    def check_placement(self, placed: Options, ppo: Any) -> None:
        def number(name: str) -> int:
            if (value := int(str(placed.get(name, self.options[name])))) < 1:
                raise ValueError(f"engine_options.{name}: expected 1 or more, got {value}")
            return value

        nodes, gpus_per_node = number("cluster.num_nodes"), number("cluster.gpus_per_node")
        reward_nodes, reward_gpus = number(REWARD_NODES), number(REWARD_GPUS)
        left = gpus_per_node - reward_gpus if nodes == 1 else nodes - reward_nodes
        if reward_gpus > gpus_per_node or reward_nodes > nodes or left < 1:
            raise ValueError(
                f"the reward model has {reward_nodes} x {reward_gpus} GPUs of its own ({REWARD}."
                f"resources), which leaves none of {nodes} x {gpus_per_node} for the policy: raise "
                "launcher.gpus_per_node or launcher.nodes"
            )
        gpus = left if nodes == 1 else left * gpus_per_node
        for role in ("policy", "value"):
            name = f"{role}.dtensor_cfg"
            size = number(f"{name}.tensor_parallel_size") * number(f"{name}.context_parallel_size")
            check_divides(f"{name}.tensor_parallel_size x context_parallel_size", size, gpus)
            check_workers("critic" if role == "value" else role, gpus // size, ppo)
            if gpus == 1 and placed.get(f"{name}.cpu_offload"):
                raise ValueError(f"engine_options.{name}.cpu_offload needs two GPUs or more")
        packed = placed.get("policy.sequence_packing.enabled", True)
        if packed and number("policy.dtensor_cfg.context_parallel_size") > 1:
            raise ValueError(
                "engine_options: policy.dtensor_cfg.context_parallel_size above 1 needs "
                "policy.sequence_packing.enabled: false"
            )
        size = number(f"{VLLM}.tensor_parallel_size") * number(f"{VLLM}.pipeline_parallel_size")
        check_divides(f"{VLLM}.tensor_parallel_size x pipeline_parallel_size", size, gpus)
        size = number(f"{REWARD}.dtensor_cfg.tensor_parallel_size")
        check_divides(
            f"{REWARD}.dtensor_cfg.tensor_parallel_size", size, reward_nodes * reward_gpus
        )
        workers = reward_nodes * reward_gpus // size
        if ppo.batch_size % (ppo.micro_batch_size * workers):
            raise ValueError(
                f"ppo.batch_size {ppo.batch_size} must be a multiple of ppo.micro_batch_size "
                f"{ppo.micro_batch_size} times the {workers} data-parallel workers of the reward "
                "model"
            )


def check_divides(name: str, size: int, gpus: int) -> None:
    """Check that the GPUs of a role are whole groups.

    Raises:
        ValueError: they are not.
    """
    if gpus % size:
        raise ValueError(
            f"engine_options: {name} is {size}, which must divide the role's number of GPUs, {gpus}"
        )


NEMO_RL = NemoRlSettings()
