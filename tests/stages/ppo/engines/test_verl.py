"""verl's command line, prompts, critic and files. Expected values are written by hand from the
source of the recorded version.
"""

from typing import Any

import pytest
from datasets import Dataset
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
)

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json
from stages.lib.core.params import Params
from stages.lib.core.params.verl import VERL
from stages.ppo.engines.critic import write_critic
from tests.stages.ppo.engines.critics import check_critic
from tests.stages.ppo.engines.test_openrlhf import DISTINCT
from tests.stages.ppo.engines.verl_job import TwoEnds, job_of, make

EXPECTED = {
    "actor_rollout_ref.model.path": "/sft",
    "actor_rollout_ref.model.custom_chat_template": "{{ messages[0]['content'] }}",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 2,
    "actor_rollout_ref.actor.optim.clip_grad": 0.5,
    "actor_rollout_ref.actor.grad_clip": 0.5,
    "actor_rollout_ref.actor.fsdp_config.seed": 7,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.actor.data_loader_seed": 7,
    "actor_rollout_ref.actor.checkpoint.save_contents": [
        *("model", "optimizer", "extra", "hf_model")
    ],
    "actor_rollout_ref.actor.checkpoint.load_contents": ["model", "optimizer", "extra"],
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.actor.ppo_epochs": 3,
    "actor_rollout_ref.actor.clip_ratio": 0.15,
    "actor_rollout_ref.actor.clip_ratio_low": 0.15,
    "actor_rollout_ref.actor.clip_ratio_high": 0.15,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.max_model_len": 164,
    "actor_rollout_ref.rollout.temperature": 0.7,
    "actor_rollout_ref.rollout.seed": 7,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "critic.model.path": "/work/critic",
    "critic.model.tokenizer_path": "/reward",
    "critic.model.enable_gradient_checkpointing": True,
    "critic.optim.lr": 9e-6,
    "critic.optim.lr_warmup_steps": 2,
    "critic.optim.clip_grad": 0.5,
    "critic.grad_clip": 0.5,
    "critic.fsdp.seed": 7,
    "critic.fsdp.param_offload": True,
    "critic.fsdp.optimizer_offload": True,
    "critic.data_loader_seed": 7,
    "critic.ppo_micro_batch_size_per_gpu": 2,
    "critic.cliprange_value": 0.3,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.9,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.02,
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "/reward",
    "reward.reward_model.rollout.name": "vllm",
    "reward.reward_model.rollout.max_model_len": 165,
    "reward.reward_model.rollout.tensor_model_parallel_size": 1,
    "reward.reward_model.rollout.gpu_memory_utilization": 0.5,
    "reward.reward_manager.source": "importlib",
    "reward.reward_manager.name": "RondoReward",
    "reward.reward_manager.module.path": "/work/rondo_verl.py",
    "reward.custom_reward_function.path": "/work/rondo_verl.py",
    "reward.custom_reward_function.name": "compute_score",
    "data.train_files": "/work/prompts.parquet",
    "data.val_files": "/work/prompts.parquet",
    "data.val_max_samples": 1,
    "data.train_batch_size": 48,
    "data.max_prompt_length": 64,
    "data.max_response_length": 100,
    "data.shuffle": False,
    "data.seed": 7,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 4,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 10,
    "trainer.project_name": "rondo",
    "trainer.experiment_name": "ppo",
    "trainer.logger": ["console", "tensorboard"],
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": 5,
    "trainer.default_local_dir": "/work/states",
    "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.max_critic_ckpt_to_keep": 2,
    "trainer.checkpoint_callback_class": "rondo_verl.KeepPolicies",
    "trainer.resume_mode": "disable",
}


def distinct(**ppo: Any) -> Params:
    return make(
        ppo=DISTINCT | ppo,
        prepare={"max_prompt_tokens": 64},
        seed=7,
        launcher={"gpus_per_node": 4},
    )


def test_each_setting_goes_to_the_key_that_means_it():
    assert job_of(distinct()).options() == EXPECTED


def test_a_job_with_a_checkpoint_continues_from_it(tmp_path):
    job = job_of(distinct(), tmp_path)
    assert job.options()["trainer.resume_mode"] == "disable"
    job.states.mkdir()
    for text, update in (("", None), ("10", 10)):  # empty: it is being written
        (job.states / "latest_checkpointed_iteration.txt").write_text(text)
        options = job.options()
        folder = str(job.states / f"global_step_{update}") if update else None
        assert options.get("trainer.resume_from_path") == folder
        assert options["trainer.resume_mode"] == ("resume_path" if update else "disable")


def test_each_key_is_one_that_verl_has_and_no_user_can_set_it_twice():
    placed = VERL.placement(1, 8, {})
    for name, value in EXPECTED.items():
        assert not VERL.mistake(name, value), name
        launcher = name in ("trainer.nnodes", "trainer.n_gpus_per_node")
        assert bool(VERL.setter(name)) != (name in placed) or launcher, name
    for name in VERL.set_by:
        assert any(f"{option}.".startswith(f"{name}.") for option in VERL.options), name


def test_the_options_of_the_user_replace_those_of_the_placement():
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    options = {size: 2, "critic.fsdp.param_offload": False, "trainer.critic_warmup": 3}
    assert job_of(distinct(engine_options=options)).options() == EXPECTED | options


def test_keys_that_verls_config_does_not_name_are_added():
    """Ray's workers get the folder of the metrics; the critic has micro-batches."""
    assert [word for word in job_of(distinct()).arguments() if word.startswith("+")] == [
        "+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR='/work/tensorboard'",
        "+critic.fsdp.use_dynamic_bsz=false",
        "+critic.fsdp.micro_batch_size_per_gpu=2",
        "+critic.fsdp.infer_micro_batch_size_per_gpu=2",
    ]


def test_prompts_are_messages_in_the_order_of_the_updates(written):
    rows = Dataset.from_parquet(str(written.prompts)).to_list()
    assert len(rows) == 32
    assert rows[3] == {
        "data_source": "rondo",
        "prompt": [{"role": "user", "content": "cat"}],
        "ability": "rlhf",
        "reward_model": {"style": "model", "ground_truth": ""},
        "extra_info": {"index": 3, "id": "cat"},
    }
    assert read_json(written.folder / "rondo_verl.json", "") == {
        "model": str(written.reward),
        "mean": 1.5,
        "std": 2.0,
        "ends": [2, 9],
        "clip": 2.0,
        "missing_eos_penalty": 0.5,
        "length_penalty": 0.125,
        "free_length": 3,
    }


def test_the_critics_values_are_calibrated_scores(written):
    check_critic(written)


def test_a_model_whose_critic_could_not_start_from_its_rewards_is_refused(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    GPTNeoXForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    with pytest.raises(BadInput, match="GPTNeoXForTokenClassification cannot start from a reward"):
        write_critic(tmp_path / "reward", tmp_path / "critic", "verl")
    assert not (tmp_path / "critic").exists()


def test_a_job_that_continues_leaves_the_last_checkpoint_and_all_policies(written):
    """verl would keep those of earlier jobs for ever."""
    for update in (2, 4, 6):
        policy = written.states / f"global_step_{update}/actor/huggingface"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text(str(update))
    (written.states / "latest_checkpointed_iteration.txt").write_text("4")
    written.write_prompts([{"id": "1", "prompt": "cat"}], TwoEnds())
    assert [path.name for path in written.states.glob("global_step_*")] == ["global_step_4"]
    policies = written.policies(0, ended=False)
    assert {n: (path / "config.json").read_text() for n, path in policies.items()} == {
        2: "2",
        4: "4",
    }
    assert policies[4].is_relative_to(written.states)
