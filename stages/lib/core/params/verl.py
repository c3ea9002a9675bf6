"""verl as the engine of PPO: what it cannot do, and the keys of its config.

verl.json has the keys with their defaults, of the config that its wheel has written out
(tests/stages/ppo/engines/verl_config.py). verl does not check the types of values.
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

GPU_MEMORY_UTILIZATION = 0.5  # vLLM's share of a GPU, if the other models wait meanwhile

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
REWARD_ROLLOUT = "reward.reward_model.rollout"

ACTOR_ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
CRITIC_ULYSSES = "critic.fsdp.ulysses_sequence_parallel_size"

SET_BY = {
    "actor_rollout_ref.hybrid_engine": "Rondo",
    f"{ACTOR}.checkpoint": "Rondo",
    f"{ACTOR}.clip_ratio": "ppo.cliprange",
    f"{ACTOR}.clip_ratio_high": "ppo.cliprange",
    f"{ACTOR}.clip_ratio_low": "ppo.cliprange",
    f"{ACTOR}.data_loader_seed": "seed",
    f"{ACTOR}.entropy_coeff": "ppo.entropy_coef",
    f"{ACTOR}.fsdp_config.seed": "seed",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ACTOR_ULYSSES,
    f"{ACTOR}.grad_clip": "ppo.max_grad_norm",
    f"{ACTOR}.kl_loss_coef": "ppo.kl_coef",
    f"{ACTOR}.kl_loss_type": "ppo.kl_coef",
    f"{ACTOR}.loss_agg_mode": "ppo.loss_level",
    f"{ACTOR}.loss_scale_factor": "ppo.loss_level",
    f"{ACTOR}.optim.clip_grad": "ppo.max_grad_norm",
    f"{ACTOR}.optim.lr": "ppo.learning_rate",
    f"{ACTOR}.optim.lr_warmup_steps": "ppo.warmup_updates",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "ppo.warmup_updates",
    f"{ACTOR}.optim.total_training_steps": "ppo.total_episodes",
    f"{ACTOR}.policy_loss": "ppo.loss_level",
    f"{ACTOR}.ppo_epochs": "ppo.num_ppo_epochs",
    f"{ACTOR}.ppo_micro_batch_size": "ppo.micro_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "ppo.micro_batch_size",
    f"{ACTOR}.ppo_mini_batch_size": "ppo.mini_batch_size",
    f"{ACTOR}.rollout_n": "Rondo",
    f"{ACTOR}.use_kl_loss": "ppo.kl_coef",
    f"{MODEL}.custom_chat_template": "Rondo",
    f"{MODEL}.enable_gradient_checkpointing": "ppo.gradient_checkpointing",
    f"{MODEL}.hf_config_path": "Rondo",
    f"{MODEL}.lora": "ppo.lora",
    f"{MODEL}.lora_adapter_path": "ppo.lora",
    f"{MODEL}.lora_alpha": "ppo.lora",
    f"{MODEL}.lora_rank": "ppo.lora",
    f"{MODEL}.mtp": "Rondo",
    f"{MODEL}.path": "Rondo",
    f"{MODEL}.tokenizer_path": "Rondo",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "ppo.micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "ppo.micro_batch_size",
    "actor_rollout_ref.ref.rollout_n": "Rondo",
    f"{ROLLOUT}.agent": "Rondo",
    f"{ROLLOUT}.do_sample": "Rondo",
    f"{ROLLOUT}.ignore_eos": "Rondo",
    f"{ROLLOUT}.log_prob_micro_batch_size": "ppo.micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "ppo.micro_batch_size",
    f"{ROLLOUT}.max_model_len": "ppo.response_length and prepare.max_prompt_tokens",
    f"{ROLLOUT}.mode": "Rondo",
    f"{ROLLOUT}.multi_turn": "Rondo",
    f"{ROLLOUT}.n": "Rondo",
    f"{ROLLOUT}.n_gpus_per_node": "launcher.gpus_per_node",
    f"{ROLLOUT}.name": "Rondo",
    f"{ROLLOUT}.nnodes": "launcher.nodes",
    f"{ROLLOUT}.prompt_length": "prepare.max_prompt_tokens",
    f"{ROLLOUT}.response_length": "ppo.response_length",
    f"{ROLLOUT}.seed": "seed",
    f"{ROLLOUT}.skip_tokenizer_init": "Rondo",
    f"{ROLLOUT}.temperature": "ppo.temperature",
    f"{ROLLOUT}.top_k": "Rondo",
    f"{ROLLOUT}.top_p": "Rondo",
    f"{ROLLOUT}.val_kwargs": "Rondo",
    "algorithm": "Rondo",
    "algorithm.rollout_correction": "",
    "critic.checkpoint": "Rondo",
    "critic.cliprange_value": "ppo.cliprange_value",
    "critic.data_loader_seed": "seed",
    "critic.enable": "Rondo",
    "critic.fsdp.seed": "seed",
    "critic.grad_clip": "ppo.max_grad_norm",
    "critic.loss_agg_mode": "ppo.loss_level",
    "critic.loss_scale_factor": "ppo.loss_level",
    "critic.model.enable_gradient_checkpointing": "ppo.gradient_checkpointing",
    "critic.model.hf_config_path": "ppo.critic",
    "critic.model.lora": "ppo.critic_lora",
    "critic.model.lora_adapter_path": "ppo.critic_lora",
    "critic.model.lora_alpha": "ppo.critic_lora",
    "critic.model.lora_rank": "ppo.critic_lora",
    "critic.model.mtp": "Rondo",
    "critic.model.path": "ppo.critic",
    "critic.model.tokenizer_path": "ppo.critic",
    "critic.optim.clip_grad": "ppo.max_grad_norm",
    "critic.optim.lr": "ppo.critic_learning_rate",
    "critic.optim.lr_warmup_steps": "ppo.warmup_updates",
    "critic.optim.lr_warmup_steps_ratio": "ppo.warmup_updates",
    "critic.optim.total_training_steps": "ppo.total_episodes",
    "critic.ppo_epochs": "ppo.num_ppo_epochs",
    "critic.ppo_micro_batch_size": "ppo.micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu": "ppo.micro_batch_size",
    "critic.ppo_mini_batch_size": "ppo.mini_batch_size",
    "critic.rollout_n": "Rondo",
    "critic.ulysses_sequence_parallel_size": CRITIC_ULYSSES,  # verl does not read it
    "critic.use_dynamic_bsz": "Rondo",
    "critic.ppo_max_token_len_per_gpu": "Rondo",
    "custom_reward_function": "Rondo",
    "data": "Rondo",
    "data.dataloader_num_workers": "",
    "distillation": "Rondo",
    "ray_kwargs": "Rondo",
    "reward": "Rondo",
    "reward.num_workers": "",
    REWARD_ROLLOUT: "",
    f"{REWARD_ROLLOUT}.max_model_len": "ppo.response_length and prepare.max_prompt_tokens",
    f"{REWARD_ROLLOUT}.name": "Rondo",
    f"{REWARD_ROLLOUT}.prompt_length": "prepare.max_prompt_tokens",
    f"{REWARD_ROLLOUT}.response_length": "ppo.response_length",
    f"{REWARD_ROLLOUT}.skip_tokenizer_init": "Rondo",
    "reward_model": "Rondo",
    "sandbox_fusion": "Rondo",
    "skip": "Rondo",
    "trainer": "Rondo",
    "trainer.balance_batch": "",
    "trainer.critic_warmup": "",
    "trainer.device": "",
    "trainer.ray_wait_register_center_timeout": "",
}

PARALLEL = ("tensor_model", "data", "pipeline_model")
# whose default is a whole number
FRACTIONS = tuple(
    f"{section}.{name}"
    for section, name in (
        (ACTOR, "entropy_coeff"),
        (ROLLOUT, "over_sample_rate"),
        (REWARD_ROLLOUT, "top_p"),
    )
)
STRATEGIES = ("fsdp", "fsdp2")  # Megatron has a config of its own


class VerlSettings(EngineSettings):
    name, title, recorded = "verl", "verl", "verl.json"
    # it does not save the coefficient of its adaptive KL, so that a job which continues would start
    # from `kl_coef` again
    required, set_by = REQUIRED, SET_BY

    def mistake(self, name: str, value: Value | list[Value]) -> str:
        if name in (f"{ACTOR}.strategy", "critic.strategy"):
            return "" if value in STRATEGIES else f"one of {', '.join(STRATEGIES)}"
        return unlike_default(self.options[name], value, whole=name not in FRACTIONS)

    def placement(self, nodes: int, gpus_per_node: int, options: Options) -> Options:
        turns: Options = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus_per_node}
        for rollout in (ROLLOUT, REWARD_ROLLOUT):
            turns |= {
                f"{rollout}.tensor_model_parallel_size": 1,
                f"{rollout}.gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            }
        for role in (f"{ACTOR}.fsdp_config", "critic.fsdp"):  # in RAM while it is not their turn
            turns |= {f"{role}.param_offload": True, f"{role}.optimizer_offload": True}
        return turns | options

    def check_placement(self, placed: Options, ppo: Any) -> None:
        def number(name: str) -> int:
            return int(str(placed.get(name, self.options.get(name, 1))))

        gpus = number("trainer.nnodes") * number("trainer.n_gpus_per_node")
        for rollout in (ROLLOUT, REWARD_ROLLOUT):
            names = [f"{rollout}.{kind}_parallel_size" for kind in PARALLEL]
            size = 1
            for name in names:
                if number(name) < 1:
                    raise ValueError(f"engine_options.{name}: expected 1 or more")
                size *= number(name)
            if gpus % size:
                raise ValueError(
                    f"engine_options: {' x '.join(names)} is {size}, which must divide the number "
                    f"of GPUs, {gpus}"
                )
        if ppo.batch_size % gpus:
            raise ValueError(
                f"ppo.batch_size {ppo.batch_size} must be a multiple of the number of GPUs, {gpus}"
            )
        for role, name in (("actor", ACTOR_ULYSSES), ("critic", CRITIC_ULYSSES)):
            shared = number(name)
            if shared < 1 or gpus % shared:
                raise ValueError(
                    f"engine_options.{name} {shared} must divide the number of GPUs, {gpus}"
                )
            check_workers(role, gpus // shared, ppo)


VERL = VerlSettings()
