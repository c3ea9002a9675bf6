"""verl's command, its inputs, and what it writes.

Read in the source of the version that is recorded: `trainer/main_ppo.py`,
`trainer/ppo/v1/trainer_base.py`, `experimental/reward_loop/`,
`utils/checkpoint/fsdp_checkpoint_manager.py`.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.lib.core.params import Params
from stages.lib.core.params.engines import Options
from stages.lib.lm.end_tokens import saved_end_tokens
from stages.ppo.common.episodes import planned_updates
from stages.ppo.engines.job import EngineJob, count, hydra_words, numbered, write_critic

GPU_MEMORY_UTILIZATION = 0.5  # vLLM's share of a GPU, if the other models wait meanwhile

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
REF, REWARD_ROLLOUT = "actor_rollout_ref.ref", "reward.reward_model.rollout"

FAILED = "Error in _run_prompt"  # the line of a failed generation in verl's output
SAVED = "actor/huggingface"  # the policy in a checkpoint
LATEST = "latest_checkpointed_iteration.txt"  # verl writes it after the checkpoint

# A prompt is one message whose text is used as it is
TEMPLATE = "{{ messages[0]['content'] }}"

# The KL is a mean over the tokens of each response. Scores are those of rondo_verl.py:
# calibrated, clipped, with penalties.
METRICS = {
    "actor/pg_loss": "policy_loss",
    "critic/vf_loss": "value_loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/entropy": "entropy",
    "actor/grad_norm": "policy_grad_norm",
    "critic/grad_norm": "critic_grad_norm",
    "actor/lr": "learning_rate",
    "actor/reward_kl_penalty": "kl_per_token",
    "critic/score/mean": "score_mean",
    "critic/vf_explained_var": "explained_variance",
    "response_length/mean": "response_length",
}


class VerlJob(EngineJob):
    """`states/global_step_<n>` has FSDP's checkpoints in `actor` and `critic`, and the policy in
    `actor/huggingface`. verl deletes all but the last two; the folder `policies` has those of all.
    """

    name, title, version = "verl", "verl", "0.9.1"
    tags, plugin = METRICS, "rondo_verl.py"
    needed = (
        *("algorithm", "data", "distillation", "ray_kwargs", "reward", "reward_model", "trainer"),
        *(
            f"{ACTOR}.{name}"
            for name in ("checkpoint", "policy_loss", "optim.lr_warmup_steps_ratio")
        ),
        *(
            f"{ROLLOUT}.{name}"
            for name in ("do_sample", "ignore_eos", "multi_turn", "top_k", "top_p")
        ),
        *(f"{model}.{lora}" for model in (MODEL, "critic.model") for lora in ("lora", "lora_rank")),
        *("critic.checkpoint", "critic.loss_agg_mode", "critic.optim.lr_warmup_steps_ratio"),
        *("critic.ppo_epochs", "critic.ppo_mini_batch_size", "critic.use_dynamic_bsz"),
    )
    free = (
        *("algorithm.rollout_correction", "data.dataloader_num_workers", "reward.num_workers"),
        *(REWARD_ROLLOUT, "trainer.balance_batch", "trainer.critic_warmup", "trainer.device"),
        "trainer.ray_wait_register_center_timeout",
    )

    def __init__(self, params: Params, folder: Path, sft: Path, reward: Path) -> None:
        super().__init__(params, folder, sft, reward)
        self.prompts = self.folder / "prompts.parquet"

    def write_prompts(self, rows: Sequence[Mapping[str, str]], tokenizer: Any) -> None:
        """Also write the plugin with its numbers, which verl loads as a module, and the critic; and
        delete checkpoints of earlier jobs, which verl would keep.
        """
        from datasets import Dataset  # takes seconds to import

        self._keep_latest()
        ppo, (mean, std) = self.params.ppo, self.calibration()
        self.write_plugin(
            {
                "model": str(self.reward),
                "mean": mean,
                "std": std,
                "ends": saved_end_tokens(self.sft, tokenizer).ids,
                "clip": ppo.score_clip,
                "missing_eos_penalty": ppo.missing_eos_penalty,
                "length_penalty": ppo.length_penalty,
                "free_length": ppo.free_length,
            }
        )
        write_critic(self.reward, self.critic_start, self.name)
        Dataset.from_list(
            [
                {
                    "data_source": "rondo",
                    "prompt": [{"role": "user", "content": row["prompt"]}],
                    "ability": "rlhf",
                    "reward_model": {"style": "model", "ground_truth": ""},
                    "extra_info": {"index": index, "id": row["id"]},
                }
                for index, row in enumerate(rows)
            ]
        ).to_parquet(str(self.prompts))

    def latest(self) -> int:
        """The update of the last complete checkpoint; 0: there is none."""
        path = self.states / LATEST
        text = path.read_text() if path.exists() else ""
        return int(text or 0)

    def _keep_latest(self) -> None:
        """Leave the last complete checkpoint, from which a job continues, and all policies."""
        latest = self.latest()
        for update, folder in numbered(self.states, "global_step_*").items():
            if update == latest:
                continue
            saved, policy = folder / SAVED, self.kept / folder.name
            if update < latest and saved.exists() and not policy.exists():
                self.kept.mkdir(exist_ok=True)
                saved.rename(policy)
            shutil.rmtree(folder)

    def policies(self, last: int, ended: bool) -> dict[int, Path]:
        """Also those of the last two checkpoints, if verl was killed before it kept them."""
        states = numbered(self.states, "global_step_*")
        saved = {update: path / SAVED for update, path in states.items() if (path / SAVED).exists()}
        latest, saved = self.latest(), saved | numbered(self.kept, "global_step_*")
        return {update: path for update, path in saved.items() if update <= latest}

    def failed_episodes(self) -> int:
        """verl trains on fewer episodes than `ppo.batch_size` then, filled up with padding. There
        may be more: Ray prints lines that repeat once.
        """
        if not self.log.exists():
            return 0
        with self.log.open(errors="replace") as lines:
            return sum(FAILED in line for line in lines)

    def words(self) -> list[str]:
        return ["python3", "-m", "verl.trainer.main_ppo", *self.arguments()]

    def arguments(self) -> list[str]:
        return hydra_words(self.options())

    def placement(self) -> Options:
        launcher = self.params.launcher
        turns: Options = {
            "trainer.nnodes": launcher.nodes,
            "trainer.n_gpus_per_node": launcher.gpus_per_node,
        }
        for rollout in (ROLLOUT, REWARD_ROLLOUT):
            turns |= {
                f"{rollout}.tensor_model_parallel_size": 1,
                f"{rollout}.gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            }
        for role in (f"{ACTOR}.fsdp_config", "critic.fsdp"):  # in RAM while it is not their turn
            turns |= {f"{role}.param_offload": True, f"{role}.optimizer_offload": True}
        return turns

    def workers(self) -> dict[str, int]:
        launcher, options = self.params.launcher, self.options()
        gpus = launcher.nodes * launcher.gpus_per_node
        return {
            role: gpus // count(options, f"{section}.ulysses_sequence_parallel_size")
            for role, section in (("actor", ACTOR), ("critic", "critic.fsdp"))
        }

    def chosen(self) -> Options:
        """All keys of verl's config that differ from its defaults, or that Rondo needs; `+`: those
        that verl reads, but that its config does not name.
        """
        return self._algorithm() | self._models() | self._run()

    def _algorithm(self) -> Options:
        """PPO with GAE and the KL in the reward, and rewards by the plugin, which asks vLLM."""
        params, ppo, plugin = self.params, self.params.ppo, str(self.folder / self.plugin)
        longest = params.prepare.max_prompt_tokens + ppo.response_length
        return {
            "algorithm.adv_estimator": "gae",
            "algorithm.gamma": ppo.gamma,
            "algorithm.lam": ppo.lam,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.type": "fixed",
            "algorithm.kl_ctrl.kl_coef": ppo.kl_coef,
            f"{ACTOR}.ppo_mini_batch_size": ppo.mini_batch_size,
            f"{ACTOR}.ppo_epochs": ppo.num_ppo_epochs,
            f"{ACTOR}.clip_ratio": ppo.cliprange,
            f"{ACTOR}.clip_ratio_low": ppo.cliprange,
            f"{ACTOR}.clip_ratio_high": ppo.cliprange,
            f"{ACTOR}.loss_agg_mode": "token-mean",
            f"{ACTOR}.entropy_coeff": ppo.entropy_coef,
            f"{ACTOR}.use_kl_loss": False,
            "critic.cliprange_value": ppo.cliprange_value,
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": str(self.reward),
            f"{REWARD_ROLLOUT}.name": "vllm",
            # one more than an episode: EOS after a response that was cut off
            f"{REWARD_ROLLOUT}.max_model_len": longest + 1,
            "reward.reward_manager.source": "importlib",
            "reward.reward_manager.name": "RondoReward",
            "reward.reward_manager.module.path": plugin,
            # without one, verl does not call the manager, but sends texts of its own template
            "reward.custom_reward_function.path": plugin,
            "reward.custom_reward_function.name": "compute_score",
        }

    def _models(self) -> Options:
        """Policy, reference and critic, and their optimizers."""
        params, ppo = self.params, self.params.ppo
        micro = ppo.micro_batch_size
        chosen: Options = {
            f"{MODEL}.path": str(self.sft),
            f"{MODEL}.custom_chat_template": TEMPLATE,
            f"{MODEL}.enable_gradient_checkpointing": ppo.gradient_checkpointing,
            "critic.model.path": str(self.critic_start),
            "critic.model.tokenizer_path": str(self.reward),
            "critic.model.enable_gradient_checkpointing": ppo.gradient_checkpointing,
            f"{ACTOR}.optim.lr": ppo.learning_rate,
            "critic.optim.lr": ppo.critic_learning_rate,
            f"{ACTOR}.fsdp_config.seed": params.seed,
            "critic.fsdp.seed": params.seed,
            f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
            f"{ACTOR}.checkpoint.load_contents": ["model", "optimizer", "extra"],
            # without them, the critic packs up to critic.ppo_max_token_len_per_gpu tokens per pass
            "+critic.fsdp.use_dynamic_bsz": False,
            "+critic.fsdp.micro_batch_size_per_gpu": micro,
            "+critic.fsdp.infer_micro_batch_size_per_gpu": micro,
        }
        for role in (ACTOR, "critic"):
            chosen |= {
                f"{role}.optim.lr_warmup_steps": ppo.warmup_updates,
                f"{role}.optim.clip_grad": ppo.max_grad_norm,
                f"{role}.grad_clip": ppo.max_grad_norm,
                f"{role}.ppo_micro_batch_size_per_gpu": micro,
                f"{role}.data_loader_seed": params.seed,
            }
        return chosen

    def _run(self) -> Options:
        """Prompts, rollouts, checkpoints and metrics."""
        params, ppo = self.params, self.params.ppo
        chosen: Options = {
            "data.train_files": str(self.prompts),
            "data.val_files": str(self.prompts),  # verl needs some, even if it never validates
            "data.val_max_samples": 1,
            "data.train_batch_size": ppo.batch_size,
            "data.max_prompt_length": params.prepare.max_prompt_tokens,
            "data.max_response_length": ppo.response_length,
            "data.shuffle": False,
            "data.seed": params.seed,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.n": 1,
            # else vLLM has to hold the longest text that the model can read
            f"{ROLLOUT}.max_model_len": params.prepare.max_prompt_tokens + ppo.response_length,
            f"{ROLLOUT}.temperature": ppo.temperature,
            f"{ROLLOUT}.seed": params.seed,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": ppo.micro_batch_size,
            f"{REF}.log_prob_micro_batch_size_per_gpu": ppo.micro_batch_size,
            "trainer.total_epochs": 1,  # the file has the prompts of all updates
            "trainer.total_training_steps": planned_updates(ppo),
            "trainer.project_name": "rondo",
            "trainer.experiment_name": "ppo",
            "trainer.logger": ["console", "tensorboard"],
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.save_freq": ppo.validation_updates,
            "trainer.default_local_dir": str(self.states),
            # with 1, verl would delete the last checkpoint before the next one is complete
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.max_critic_ckpt_to_keep": 2,
            "trainer.checkpoint_callback_class": f"{Path(self.plugin).stem}.KeepPolicies",
            "trainer.resume_mode": "disable",
            # Ray's workers have not the environment of the command
            "+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR": str(self.events),
        }
        if update := self.latest():
            folder = str(self.states / f"global_step_{update}")
            chosen |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": folder}
        return chosen
