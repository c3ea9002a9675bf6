"""NeMo RL's command, its inputs, and what it writes.

Read in the source of the version that is recorded: `nemo_rl/algorithms/ppo.py`,
`environments/reward_model_environment.py`, `data/`, `models/automodel/`, `utils/checkpoint.py`,
`experience/rollouts.py`.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.engines import Options
from stages.lib.lm.end_tokens import saved_end_tokens
from stages.ppo.common.episodes import planned_updates
from stages.ppo.engines.job import EngineJob, count, hydra_words, numbered, write_critic

Overrides = dict[str, Any]  # values of JSON

ROLES = ("policy", "value")
REWARD, VLLM = "env.reward_model", "policy.generation.vllm_cfg"
# the reward model as in NeMo RL's recipe for GRPO with one (grpo_rm_1B.yaml)
REWARD_MODEL: Overrides = {
    "processor": "math_hf_data_processor",
    "precision": "bfloat16",
    "checkpoint_path": None,
    "offload_optimizer_for_logprob": False,
    "dtensor_cfg._v2": True,
    "dtensor_cfg.enabled": True,
    "dtensor_cfg.sequence_parallel": False,
    "dtensor_cfg.tensor_parallel_size": 1,
    "dtensor_cfg.context_parallel_size": 1,
    "dtensor_cfg.custom_parallel_plan": None,
    "dtensor_cfg.cpu_offload": False,
    "dtensor_cfg.activation_checkpointing": False,
    "reward_model_cfg.enabled": True,
    "reward_model_cfg.reward_model_type": "bradley_terry",
    "dynamic_batching.enabled": False,
    "sequence_packing.enabled": False,
    "max_grad_norm": None,
}

# After a response, NeMo RL adds a message with the reward, of about 30 characters. Without room
# for it, a response counts as cut off.
REWARD_MESSAGE = 64

# NeMo RL has no metric of the KL from the reference if the KL is in the reward.
METRICS = {
    "train/loss": "policy_loss",
    "train/critic/loss": "value_loss",
    "train/approx_entropy": "entropy",
    "train/grad_norm": "policy_grad_norm",
    "train/critic/grad_norm": "critic_grad_norm",
    "train/lr": "learning_rate",
    "train/reward": "score_mean",
    "train/mean_gen_tokens_per_sample": "response_length",
    "train/truncation_rate": "truncated_rate",
}
SUMMED = ("policy_loss", "value_loss", "entropy")  # over the mini-batches of the last epoch


class NemoRlJob(EngineJob):
    """`states` has checkpoints that are not yet converted, `policies/step_<n>` the converted ones.

    A job never continues: NeMo RL would take its reference from the checkpoint, and measure the KL
    from there.
    """

    name, title, version = "nemo_rl", "NeMo RL", "0.7.0"
    needed = (
        *("checkpointing", "data", "env", "logger", "loss_fn", "ppo", "value_loss_fn"),
        *("policy.generation", "policy.tokenizer", "value.tokenizer", "value.reward_model_cfg"),
        *(f"{VLLM}.async_engine", f"{VLLM}.max_model_len", "value.sequence_packing"),
        *("policy.scheduler", "value.scheduler", "value.dtensor_cfg.context_parallel_size"),
        *(
            f"{role}.dtensor_cfg.{name}"
            for role in ROLES
            for name in ("_v2", "enabled", "lora_cfg")
        ),
        *(f"{role}.{name}" for role in ROLES for name in ("dynamic_batching", "megatron_cfg")),
    )
    free = (
        *("data.num_workers", "logger.gpu_monitoring", "logger.monitor_gpus", VLLM),
        *("loss_fn.use_importance_sampling_correction", "ppo.policy_training_start_step"),
        *("loss_fn.truncated_importance_sampling_type", f"{REWARD}.precision"),
        *("loss_fn.truncated_importance_sampling_ratio", f"{REWARD}.resources"),
        *("loss_fn.truncated_importance_sampling_ratio_min", f"{REWARD}.dtensor_cfg"),
    )
    plugin, tags, last_tag = "rondo_nemo_rl.py", METRICS, "timing/train/total_step_time"
    next_run = "starts from SFT again: NeMo RL would continue with another reference"

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        super().__init__(params, folder, sft, reward)
        self.reward_tokenizer = self.folder / "reward_tokenizer"
        self.logs = self.folder / "logs"
        self.events = self.logs / "exp_001/tensorboard"  # it counts the runs in `logs`

    def write_prompts(self, rows: Sequence[Mapping[str, str]], tokenizer: Any) -> None:
        """Also write the plugin with its overrides, the critic, and a tokenizer for the reward
        model; and delete what earlier jobs left, which NeMo RL would continue.
        """
        from transformers import AutoTokenizer  # takes seconds to import

        for left in (self.states, self.kept, self.logs):
            shutil.rmtree(left, ignore_errors=True)
        write_jsonl(self.prompts, [{"input": row["prompt"], "output": ""} for row in rows])
        write_critic(self.reward, self.critic_start, self.name)
        reader = AutoTokenizer.from_pretrained(self.reward, trust_remote_code=False)
        reader.bos_token = None  # the prompts have it where the model has one; NeMo RL adds it
        reader.save_pretrained(self.reward_tokenizer)
        ends = saved_end_tokens(self.sft, tokenizer).ids
        self.write_plugin(
            hydra_words(self.score_scale() | {"policy.generation.stop_token_ids": ends})
        )

    def score_scale(self) -> Overrides:
        """Calibration and clip: what maps mean -+ clip * std to -+ clip."""
        (mean, std), clip = self.calibration(), self.params.ppo.score_clip
        return {
            "ppo.reward_scaling.enabled": True,
            "ppo.reward_scaling.source_min": mean - clip * std,
            "ppo.reward_scaling.source_max": mean + clip * std,
            "ppo.reward_scaling.target_min": -clip,
            "ppo.reward_scaling.target_max": clip,
        }

    def words(self) -> list[str]:
        return ["python3", str(self.folder / self.plugin), *self.arguments()]

    def arguments(self) -> list[str]:
        """Hydra's overrides of NeMo RL's recipe for PPO, which has no reward model."""
        return hydra_words(
            {
                f"++{name}" if name.startswith(f"{REWARD}.") else name: value
                for name, value in self.options().items()
            }
        )

    def policies(self, last: int, ended: bool) -> dict[int, Path]:
        return numbered(self.kept, "step_*")

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        ppo = self.params.ppo
        steps = {name: ppo.batch_size // ppo.mini_batch_size for name in SUMMED}
        return super().metrics({name: value / steps.get(name, 1) for name, value in values.items()})

    def placement(self) -> Options:
        """Policy, critic and vLLM take turns; the reward model has GPUs of its own: half of a
        single node, so that batches can be divided among the others, or one of several nodes.
        """
        nodes, gpus = self.params.launcher.nodes, self.params.launcher.gpus_per_node
        return {
            "cluster.num_nodes": nodes,
            "cluster.gpus_per_node": gpus,
            f"{REWARD}.resources.num_nodes": 1,
            f"{REWARD}.resources.gpus_per_node": max(gpus // 2, 1) if nodes == 1 else gpus,
            **{f"{REWARD}.{name}": value for name, value in REWARD_MODEL.items()},
        }

    def workers(self) -> dict[str, int]:
        launcher, options = self.params.launcher, self.options()
        own = count(options, f"{REWARD}.resources.gpus_per_node")
        left = max(launcher.gpus_per_node - own, 0)
        if launcher.nodes > 1:
            nodes = launcher.nodes - count(options, f"{REWARD}.resources.num_nodes")
            left = max(nodes, 0) * launcher.gpus_per_node
        sizes = ("tensor_parallel_size", "context_parallel_size")
        return {
            role: left // math.prod(count(options, f"{role}.dtensor_cfg.{size}") for size in sizes)
            for role in ROLES
        }

    def chosen(self) -> Overrides:
        """All keys of NeMo RL's config that differ from its recipe, or that Rondo needs; `++`:
        those that NeMo RL reads, but that the recipe does not name.
        """
        return self._algorithm() | self._models() | self._run()

    @property
    def longest(self) -> int:
        """Tokens of an episode at most."""
        return self.params.prepare.max_prompt_tokens + self.params.ppo.response_length

    def _algorithm(self) -> Overrides:
        """PPO with GAE and the KL in the reward: the recipe has no KL, two ratios and a second
        clip. The reward model reads the texts of prompt and response, and EOS after them.
        """
        ppo = self.params.ppo
        return {
            "ppo.ppo_epochs": ppo.num_ppo_epochs,
            "ppo.adv_estimator.gae_gamma": ppo.gamma,
            "ppo.adv_estimator.gae_lambda": ppo.lam,
            "ppo.skip_reference_policy_logprobs_calculation": False,
            "loss_fn.use_kl_in_reward": True,
            "loss_fn.reference_policy_kl_penalty": ppo.kl_coef,
            "loss_fn.reference_policy_kl_type": "k1",
            "loss_fn.ratio_clip_min": ppo.cliprange,
            "loss_fn.ratio_clip_max": ppo.cliprange,
            "loss_fn.ratio_clip_c": None,
            "value_loss_fn.scale": 1.0,
            "value_loss_fn.cliprange": ppo.cliprange_value,
            f"{REWARD}.model_name": str(self.reward),
            f"{REWARD}.tokenizer.name": str(self.reward_tokenizer),
            f"{REWARD}.tokenizer.chat_template": None,
            f"{REWARD}.batch_size": ppo.micro_batch_size,
            f"{REWARD}.max_model_len": self.longest + 1,
            "ppo.reward_shaping.enabled": False,
            "data.default.env_name": "reward_model",
            # also here, where PPO looks whether the reward model has GPUs of its own
            "++data.env_name": "reward_model",
        }

    def _models(self) -> Overrides:
        """Policy, reference and critic, and their optimizers."""
        ppo = self.params.ppo
        chosen: Overrides = {
            "policy.model_name": str(self.sft),
            # null: messages as they are
            "++policy.tokenizer.chat_template": None,
            "policy.max_total_sequence_length": self.longest + REWARD_MESSAGE,
            "policy.optimizer.kwargs.lr": ppo.learning_rate,
            "value.model_name": str(self.critic_start),
            "value.tokenizer.name": str(self.sft),
            "value.optimizer.kwargs.lr": ppo.critic_learning_rate,
        }
        for role in ROLES:
            chosen |= {
                f"{role}.dtensor_cfg.activation_checkpointing": ppo.gradient_checkpointing,
                f"{role}.max_grad_norm": ppo.max_grad_norm,
                f"{role}.train_global_batch_size": ppo.mini_batch_size,
                f"{role}.train_micro_batch_size": ppo.micro_batch_size,
            }
            # one tick per epoch; without a warm-up, the recipe's rates are constant
            if ticks := ppo.warmup_updates * ppo.num_ppo_epochs:
                rise = {"start_factor": 1 / (ticks + 1), "total_iters": ticks}
                linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": rise}
                chosen[f"{role}.scheduler"] = [linear, {"milestones": []}]
        return chosen

    def _run(self) -> Overrides:
        """Prompts, rollouts, checkpoints and metrics."""
        params, ppo = self.params, self.params.ppo
        return {
            "ppo.seed": params.seed,
            "ppo.num_prompts_per_step": ppo.batch_size,
            "ppo.num_generations_per_prompt": 1,
            "ppo.max_num_epochs": 1,  # the file has the prompts of all updates
            "ppo.max_num_steps": planned_updates(ppo),
            "ppo.val_period": 0,
            "ppo.val_at_start": False,
            "data.train.dataset_name": "ResponseDataset",
            "++data.train.data_path": str(self.prompts),
            "data.validation": None,
            "data.shuffle": False,
            # a prompt of this length or more would be cut to 4 tokens
            "data.max_input_seq_length": params.prepare.max_prompt_tokens + 1,
            "policy.generation.max_new_tokens": ppo.response_length,
            "policy.generation.temperature": ppo.temperature,
            "checkpointing.checkpoint_dir": str(self.states),
            "checkpointing.save_period": ppo.validation_updates,
            "checkpointing.metric_name": None,
            "checkpointing.keep_top_k": None,
            "checkpointing.model_save_format": "torch_save",  # the converter reads no other
            # else a policy is written while its folder is renamed
            "++checkpointing.is_async": False,
            "checkpointing.save_optimizer": False,
            "logger.log_dir": str(self.logs),
            "logger.tensorboard_enabled": True,
        }
