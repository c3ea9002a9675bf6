"""OpenRLHF's command, its inputs, and what it writes.

Read in the source of the version that is recorded: `cli/train_ppo_ray.py`,
`trainer/ppo_trainer.py`, `trainer/ray/ppo_actor.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.engine_settings import Options
from stages.lib.core.params.openrlhf import OPENRLHF
from stages.ppo.common.episodes import planned_updates
from stages.ppo.engines.job import EngineJob

RUN_NAME = "rondo"  # of the folder with the metrics

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

    settings = OPENRLHF
    package, module = "openrlhf", "openrlhf.cli.train_ppo_ray"
    tags = METRICS

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        super().__init__(params, folder, sft, reward)
        self.prompts, self.final = self.folder / "prompts.jsonl", self.folder / "final"
        self.critic = self.folder / "final_critic"  # OpenRLHF's name for it
        self.events = self.folder / "tensorboard" / RUN_NAME

    def write_prompts(self, rows: Sequence[Mapping[str, str]], _: Any) -> None:
        write_jsonl(self.prompts, rows)

    def policies(self, last: int, ended: bool) -> dict[int, Path]:
        folders = {
            int(folder.name.removeprefix("global_step").removesuffix("_hf")): folder
            for folder in self.states.glob("global_step*_hf")
        }
        if ended:
            return folders | {last: self.final}
        # metrics are written before the checkpoint, so that the last one may be in the making
        return {update: folder for update, folder in folders.items() if update < last}

    def arguments(self) -> list[str]:
        return arguments(self.options())

    def options(self) -> Options:
        """All options of the command."""
        params, ppo, launcher = self.params, self.params.ppo, self.params.launcher
        warmup = ppo.warmup_updates / planned_updates(ppo)
        chosen: Options = {
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
            "critic.save_value_network": True,
            "ckpt.path": str(self.states),
            "ckpt.output_dir": str(self.final),
            "ckpt.save_steps": ppo.validation_updates,
            "ckpt.save_hf": True,
            "ckpt.max_num": 1,  # DeepSpeed's, to resume from; it leaves those of Hugging Face
            "ckpt.load_enable": (self.states / "_actor").exists(),
            "logger.tensorboard_dir": str(self.events.parent),
            "logger.wandb.run_name": RUN_NAME,
        }
        nodes, gpus = launcher.nodes, launcher.gpus_per_node
        return self.settings.placement(nodes, gpus, ppo.engine_options) | chosen


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
