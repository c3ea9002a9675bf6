"""OpenRLHF as the engine of PPO: what it cannot do, and the options of its command.

openrlhf.json has the options as the parser of its command declares them
(tests/stages/ppo/engines/openrlhf_parser.py). argparse would also take an abbreviation.
"""

from collections.abc import Mapping
from typing import Any

from stages.lib.core.params.engine_settings import (
    REQUIRED,
    EngineSettings,
    Options,
    Value,
    check_workers,
)

GPU_MEMORY_UTILIZATION = 0.6  # vLLM's share of a GPU, if the other models wait meanwhile

SET_BY = {
    "actor.adam.lr": "ppo.learning_rate",
    "actor.entropy_coef": "ppo.entropy_coef",
    "actor.eps_clip": "ppo.cliprange",
    "actor.eps_clip_low_high": "ppo.cliprange",
    "actor.gradient_checkpointing_enable": "ppo.gradient_checkpointing",
    "actor.lr_warmup_ratio": "ppo.warmup_updates",
    "actor.max_norm": "ppo.max_grad_norm",
    "actor.model_name_or_path": "Rondo",
    "actor.muon.nesterov": "Rondo",
    "actor.policy_loss_type": "ppo.loss_level",
    "algo.advantage.estimator": "algorithm",
    "algo.advantage.gamma": "ppo.gamma",
    "algo.advantage.lambd": "ppo.lam",
    "algo.dynamic_filtering_enable": "Rondo",
    "algo.kl.estimator": "Rondo",
    "algo.kl.init_coef": "ppo.kl_coef",
    "algo.kl.target": "ppo.kl_control",
    "algo.kl.use_loss": "Rondo",
    "ckpt.load_enable": "Rondo",
    "ckpt.max_num": "Rondo",
    "ckpt.output_dir": "Rondo",
    "ckpt.path": "Rondo",
    "ckpt.save_hf": "Rondo",
    "ckpt.save_steps": "ppo.validation_updates",
    "critic.adam.lr": "ppo.critic_learning_rate",
    "critic.lr_warmup_ratio": "ppo.warmup_updates",
    "critic.max_norm": "ppo.max_grad_norm",
    "critic.model_name_or_path": "ppo.critic",
    "critic.muon.nesterov": "Rondo",
    "critic.save_value_network": "Rondo",
    "critic.value_clip": "ppo.cliprange_value",
    "data.apply_chat_template": "prepare.prompt_format",
    "data.input_key": "Rondo",
    "data.input_template": "prepare.prompt_format",
    "data.max_images_per_prompt": "Rondo",
    "data.max_len": "ppo.response_length and prepare.max_prompt_tokens",
    "data.max_samples": "ppo.total_episodes",
    "data.prompt_dataset": "Rondo",
    "ds.lora.rank": "ppo.lora.r",
    "eval.dataset": "Rondo",
    "logger.tensorboard_dir": "Rondo",
    "logger.wandb.run_name": "Rondo",
    "reward.clip_range": "ppo.score_clip",
    "reward.model_name_or_path": "Rondo",
    "reward.normalize_enable": "Rondo",
    "reward.remote_url": "ppo.reward_url",
    "rollout.batch_size": "ppo.batch_size",
    "rollout.max_new_tokens": "ppo.response_length",
    "rollout.micro_batch_size": "ppo.micro_batch_size",
    "rollout.n_samples_per_prompt": "Rondo",
    "rollout.temperature": "ppo.temperature",
    "rollout.top_p": "Rondo",
    "rollout.vllm_generate_batch_size": "ppo.batch_size",
    "train.agent_func_path": "ppo.rewards",
    "train.async_enable": "Rondo",
    "train.batch_size": "ppo.mini_batch_size",
    "train.enable_ema": "Rondo",
    "train.max_epochs": "ppo.num_ppo_epochs",
    "train.micro_batch_size": "ppo.micro_batch_size",
    "train.num_episodes": "ppo.total_episodes",
    "train.partial_rollout_enable": "Rondo",
    "train.seed": "seed",
    "use_ms": "Rondo",
}


class OpenRlhfSettings(EngineSettings):
    name, title, recorded = "openrlhf", "OpenRLHF", "openrlhf.json"
    # it says itself that its adaptive KL does not work
    required = REQUIRED | {"length_penalty": 0.0, "missing_eos_penalty": 0.0}
    set_by = SET_BY

    def mistake(self, name: str, value: Value | list[Value]) -> str:
        option: Mapping[str, Any] = self.options[name]
        kind, number = option["type"], option.get("nargs")
        if number is not None:
            fits = isinstance(value, list) and all(_fits(item, kind) for item in value)
            least = {"+": 1, "*": 0}.get(number, number)
            if fits and isinstance(value, list):
                fits = len(value) >= least if isinstance(number, str) else len(value) == number
            size = number if isinstance(number, int) else f"at least {least}"
            return "" if fits else f"a list of {size} of type {kind}"
        if isinstance(value, list) or not _fits(value, kind):
            return f"a value of type {kind}"
        choices = option.get("choices", [value])
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"

    def placement(self, nodes: int, gpus_per_node: int, options: Options) -> Options:
        engines = {"vllm.tensor_parallel_size": 1} | options
        size = engines["vllm.tensor_parallel_size"]
        roles: Options = {}
        for role in ("actor", "ref", "critic", "reward"):
            roles |= {f"{role}.num_nodes": nodes, f"{role}.num_gpus_per_node": gpus_per_node}
        turns: Options = {
            "train.colocate_all": True,
            "vllm.num_engines": max(nodes * gpus_per_node // max(int(str(size)), 1), 1),
            "vllm.tensor_parallel_size": 1,
            "vllm.enable_sleep": True,
            "vllm.gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            "ds.enable_sleep": True,
            "ds.zero_stage": 3,
            "ds.packing_samples": True,
        }
        return roles | turns | options

    def check_placement(self, placed: Options, ppo: Any) -> None:
        def number(name: str) -> int:
            return int(str(placed.get(name, 1)))

        gpus = {
            role: number(f"{role}.num_nodes") * number(f"{role}.num_gpus_per_node")
            for role in ("actor", "ref", "critic", "reward")
        }
        together = bool(placed.get("train.colocate_all"))
        with_reference = together or bool(placed.get("train.colocate_actor_ref"))
        engines = number("vllm.num_engines") * number("vllm.tensor_parallel_size")
        if with_reference and gpus["ref"] != gpus["actor"]:
            raise ValueError(
                f"engine_options: actor has {gpus['actor']} GPUs and ref {gpus['ref']}, but they "
                "share them: make the numbers equal"
            )
        if placed.get("train.colocate_critic_reward") and gpus["critic"] != gpus["reward"]:
            raise ValueError(
                f"engine_options: critic has {gpus['critic']} GPUs and reward {gpus['reward']}, "
                "but they share them: make the numbers equal"
            )
        if together and engines != gpus["actor"]:
            raise ValueError(
                f"engine_options: vllm.num_engines x vllm.tensor_parallel_size is {engines}, but "
                f"must be the number of GPUs, {gpus['actor']}, if train.colocate_all is true"
            )
        attention = str(placed.get("ds.attn_implementation", "flash_attention_2"))
        if placed.get("ds.packing_samples") and "flash_attention" not in attention:
            raise ValueError(
                f"engine_options: ds.attn_implementation {attention} with ds.packing_samples: "
                "OpenRLHF would use flash_attention_2: set ds.packing_samples to false"
            )
        for name in ("ds.ring_attn_size", "ds.tensor_parallel_size", "vllm.tensor_parallel_size"):
            if number(name) < 1:
                raise ValueError(f"engine_options.{name}: expected 1 or more, got {number(name)}")
        shared = number("ds.ring_attn_size") * number("ds.tensor_parallel_size")
        for role in ("actor", "critic"):
            check_workers(role, gpus[role] // shared, ppo)


def _fits(value: Value, kind: str) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float)
    return isinstance(value, int if kind == "int" else str)


OPENRLHF = OpenRlhfSettings()
