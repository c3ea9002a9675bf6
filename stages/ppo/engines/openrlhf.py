"""OpenRLHF's command, its inputs, and what it writes.

Read in the source of the version that is recorded: `cli/train_ppo_ray.py`,
`trainer/ppo_trainer.py`, `trainer/ray/ppo_actor.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.engines import Options
from stages.ppo.common.episodes import planned_updates
from stages.ppo.engines.job import EngineJob, count, numbered

RUN_NAME = "rondo"  # of the folder with the metrics
GPU_MEMORY_UTILIZATION = 0.6  # vLLM's share of a GPU, if the other models wait meanwhile

# `kl` is a mean over the tokens of each response, and the reward is the calibrated score, before it
# is clipped.
METRICS = {
    "train/policy_loss": "policy_loss",
    "train/critic_loss": "value_loss",
    "train/ppo_clip_ratio": "clip_fraction",
    "train/entropy_loss": "entropy",
    "train/actor_grad_norm": "policy_grad_norm",
    "train/critic_grad_norm": "critic_grad_norm",
    "train/actor_lr": "learning_rate",
    "train/kl": "kl_per_token",
    "train/rollout/reward_mean": "score_mean",
    "train/rollout/reward_std": "score_std",
    "train/rollout/response_length_mean": "response_length",
    "train/rollout/truncated_rate": "truncated_rate",
}


class OpenRlhfJob(EngineJob):
    """`states` has DeepSpeed's checkpoints in `_actor` and `_critic`, and `global_step<n>_hf`."""

    name, title, version = "openrlhf", "OpenRLHF", "0.11.2"
    tags = METRICS
    needed = (
        *("actor.eps_clip_low_high", "actor.policy_loss_type", "algo.dynamic_filtering_enable"),
        *("algo.kl.target", "algo.kl.use_loss", "data.apply_chat_template", "data.input_template"),
        *("data.max_images_per_prompt", "data.max_samples", "ds.lora.rank", "eval.dataset"),
        *("reward.remote_url", "rollout.vllm_generate_batch_size", "train.agent_func_path"),
        *("train.async_enable", "train.enable_ema", "train.partial_rollout_enable", "use_ms"),
    )

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        super().__init__(params, folder, sft, reward)
        self.final = self.folder / "final"
        self.events /= RUN_NAME

    def write_prompts(self, rows: Sequence[Mapping[str, str]], _: Any) -> None:
        write_jsonl(self.prompts, rows)

    def policies(self, last: int, ended: bool) -> dict[int, Path]:
        folders = numbered(self.states, "global_step*_hf")
        if ended:
            return folders | {last: self.final}
        # metrics are written before the checkpoint, so that the last one may be in the making
        return {update: folder for update, folder in folders.items() if update < last}

    def words(self) -> list[str]:
        return ["python3", "-m", "openrlhf.cli.train_ppo_ray", *self.arguments()]

    def arguments(self) -> list[str]:
        return arguments(self.options())

    def placement(self) -> Options:
        nodes, gpus = self.params.launcher.nodes, self.params.launcher.gpus_per_node
        size = count(self.params.ppo.engine_options, "vllm.tensor_parallel_size")
        roles = ("actor", "ref", "critic", "reward")
        return {
            **{f"{role}.num_nodes": nodes for role in roles},
            **{f"{role}.num_gpus_per_node": gpus for role in roles},
            "train.colocate_all": True,
            "vllm.num_engines": max(nodes * gpus // size, 1),
            "vllm.tensor_parallel_size": 1,
            "vllm.enable_sleep": True,
            "vllm.gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            "ds.enable_sleep": True,
            "ds.zero_stage": 3,
            "ds.packing_samples": True,
        }

    def workers(self) -> dict[str, int]:
        number = partial(count, self.options())
        shared = number("ds.ring_attn_size") * number("ds.tensor_parallel_size")
        return {
            role: number(f"{role}.num_nodes") * number(f"{role}.num_gpus_per_node") // shared
            for role in ("actor", "critic")
        }

    def chosen(self) -> Options:
        params, ppo = self.params, self.params.ppo
        warmup = ppo.warmup_updates / planned_updates(ppo)
        return {
            "actor.model_name_or_path": str(self.sft),
            "reward.model_name_or_path": str(self.reward),
            "critic.model_name_or_path": str(self.reward),
            "reward.normalize_enable": True,  # by mean and std of the reward model's config.json
            "reward.clip_range": [-ppo.score_clip, ppo.score_clip],
            "data.prompt_dataset": str(self.prompts),
            "data.input_key": "prompt",
            "data.max_len": params.prepare.max_prompt_tokens + ppo.response_length,
            "rollout.batch_size": ppo.batch_size,
            "rollout.micro_batch_size": ppo.micro_batch_size,
            "rollout.n_samples_per_prompt": 1,
            "rollout.max_new_tokens": ppo.response_length,
            "rollout.temperature": ppo.temperature,
            "rollout.top_p": 1.0,
            "train.num_episodes": 1,  # the file has the prompts of all updates
            "train.batch_size": ppo.mini_batch_size,
            "train.micro_batch_size": ppo.micro_batch_size,
            "train.max_epochs": ppo.num_ppo_epochs,
            "train.seed": params.seed,
            "algo.advantage.estimator": "gae",
            "algo.advantage.gamma": ppo.gamma,
            "algo.advantage.lambd": ppo.lam,
            "algo.kl.init_coef": ppo.kl_coef,
            "algo.kl.estimator": "k1",
            "actor.adam.lr": ppo.learning_rate,
            "actor.eps_clip": ppo.cliprange,
            "actor.entropy_coef": ppo.entropy_coef,
            "actor.max_norm": ppo.max_grad_norm,
            "actor.lr_warmup_ratio": warmup,
            "actor.gradient_checkpointing_enable": ppo.gradient_checkpointing,
            "critic.adam.lr": ppo.critic_learning_rate,
            "critic.value_clip": ppo.cliprange_value,
            "critic.max_norm": ppo.max_grad_norm,
            "critic.lr_warmup_ratio": warmup,
            "ckpt.path": str(self.states),
            "ckpt.output_dir": str(self.final),
            "ckpt.save_steps": ppo.validation_updates,
            "ckpt.save_hf": True,
            "ckpt.max_num": 1,  # DeepSpeed's, to resume from; it leaves those of Hugging Face
            "ckpt.load_enable": (self.states / "_actor").exists(),
            "logger.tensorboard_dir": str(self.events.parent),
            "logger.wandb.run_name": RUN_NAME,
        }


def arguments(chosen: Options) -> list[str]:
    """The command line of options: `--name value`; a switch is there or not.

    >>> arguments({"train.seed": 1, "ckpt.save_hf": True, "reward.clip_range": [-5.0, 5.0]})
    ['--train.seed', '1', '--ckpt.save_hf', '--reward.clip_range', '-5.0', '5.0']
    """
    words: list[str] = []
    for name, value in chosen.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words
