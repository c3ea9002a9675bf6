"""NeMo RL's command line, prompts, critic and files. Expected values are written by hand from the
source of the recorded version.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.nemo_rl import NEMO_RL, REWARD
from stages.ppo.engines.job import EngineMetrics
from stages.ppo.engines.nemo_rl import NemoRlJob
from tests import engine_settings
from tests.stages.ppo.engines.critics import check_critic
from tests.stages.ppo.engines.stand_in.install import RECIPE, install, recorded_versions
from tests.stages.ppo.engines.test_openrlhf import DISTINCT

# 2 updates of 3 epochs: 1/7, 2/7, ... 7/7
WARM_UP = [
    {
        "name": "torch.optim.lr_scheduler.LinearLR",
        "kwargs": {"start_factor": pytest.approx(1 / 7), "total_iters": 6},
    },
    {"milestones": []},
]
EXPECTED = {
    "policy.model_name": "/sft",
    "policy.tokenizer.chat_template": None,
    "policy.max_total_sequence_length": 228,  # 64 of the prompt, 100, and 64 for a message
    "policy.optimizer.kwargs.lr": 1e-6,
    "policy.dtensor_cfg.activation_checkpointing": True,
    "policy.max_grad_norm": 0.5,
    "policy.train_global_batch_size": 16,
    "policy.train_micro_batch_size": 2,
    "policy.scheduler": WARM_UP,
    "policy.generation.max_new_tokens": 100,
    "policy.generation.temperature": 0.7,
    "value.model_name": "/work/critic",
    "value.tokenizer.name": "/sft",
    "value.optimizer.kwargs.lr": 9e-6,
    "value.dtensor_cfg.activation_checkpointing": True,
    "value.max_grad_norm": 0.5,
    "value.train_global_batch_size": 16,
    "value.train_micro_batch_size": 2,
    "value.scheduler": WARM_UP,
    "value_loss_fn.scale": 1.0,
    "value_loss_fn.cliprange": 0.3,
    "loss_fn.use_kl_in_reward": True,
    "loss_fn.reference_policy_kl_penalty": 0.02,
    "loss_fn.reference_policy_kl_type": "k1",
    "loss_fn.ratio_clip_min": 0.15,
    "loss_fn.ratio_clip_max": 0.15,
    "loss_fn.ratio_clip_c": None,
    "ppo.skip_reference_policy_logprobs_calculation": False,
    "ppo.ppo_epochs": 3,
    "ppo.adv_estimator.gae_gamma": 0.99,
    "ppo.adv_estimator.gae_lambda": 0.9,
    "ppo.reward_shaping.enabled": False,
    "ppo.seed": 7,
    "ppo.num_prompts_per_step": 48,
    "ppo.num_generations_per_prompt": 1,
    "ppo.max_num_epochs": 1,
    "ppo.max_num_steps": 10,
    "ppo.val_period": 0,
    "ppo.val_at_start": False,
    "data.train.dataset_name": "ResponseDataset",
    "data.train.data_path": "/work/prompts.jsonl",
    "data.validation": None,
    "data.shuffle": False,
    "data.max_input_seq_length": 65,
    "data.default.env_name": "reward_model",
    "data.env_name": "reward_model",
    "checkpointing.checkpoint_dir": "/work/states",
    "checkpointing.save_period": 5,
    "checkpointing.metric_name": None,
    "checkpointing.keep_top_k": None,
    "checkpointing.model_save_format": "torch_save",
    "checkpointing.is_async": False,
    "checkpointing.save_optimizer": False,
    "logger.log_dir": "/work/logs",
    "logger.tensorboard_enabled": True,
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 8,
    # as in the recipe with a reward model, but for its model, lengths and batches
    "env.reward_model.processor": "math_hf_data_processor",
    "env.reward_model.model_name": "/reward",
    "env.reward_model.tokenizer.name": "/work/reward_tokenizer",
    "env.reward_model.tokenizer.chat_template": None,
    "env.reward_model.precision": "bfloat16",
    "env.reward_model.batch_size": 2,
    "env.reward_model.checkpoint_path": None,
    "env.reward_model.max_model_len": 165,
    "env.reward_model.offload_optimizer_for_logprob": False,
    "env.reward_model.resources.gpus_per_node": 4,
    "env.reward_model.resources.num_nodes": 1,
    "env.reward_model.dtensor_cfg._v2": True,
    "env.reward_model.dtensor_cfg.enabled": True,
    "env.reward_model.dtensor_cfg.sequence_parallel": False,
    "env.reward_model.dtensor_cfg.tensor_parallel_size": 1,
    "env.reward_model.dtensor_cfg.context_parallel_size": 1,
    "env.reward_model.dtensor_cfg.custom_parallel_plan": None,
    "env.reward_model.dtensor_cfg.cpu_offload": False,
    "env.reward_model.dtensor_cfg.activation_checkpointing": False,
    "env.reward_model.reward_model_cfg.enabled": True,
    "env.reward_model.reward_model_cfg.reward_model_type": "bradley_terry",
    "env.reward_model.dynamic_batching.enabled": False,
    "env.reward_model.sequence_packing.enabled": False,
    "env.reward_model.max_grad_norm": None,
}
# what NeMo RL reads, but its recipes do not name
UNNAMED = {
    "checkpointing.is_async",
    "data.env_name",
    "data.train.data_path",
    "data.validation",
    "env.reward_model.tokenizer.chat_template",
    "policy.tokenizer.chat_template",
}


def make(**sections: Any) -> Params:
    ppo = engine_settings.NEMO_RL | {"micro_batch_size": 2} | sections.pop("ppo", {})
    launcher = {"ray_address": "http://ray:8265"} | sections.pop("launcher", {})
    return check_params({"ppo": ppo, "launcher": launcher} | sections, "test")


def distinct(**ppo: Any) -> Params:
    return make(
        ppo=DISTINCT | {"entropy_coef": 0.0} | ppo,
        prepare={"max_prompt_tokens": 64},
        seed=7,
        launcher={"gpus_per_node": 8},
    )


def job_of(params: Params, folder: Path = Path("/work"), models: Path = Path("/")) -> NemoRlJob:
    return NemoRlJob(params, folder, models / "sft", models / "reward")


def test_each_setting_goes_to_the_key_that_means_it():
    assert job_of(distinct()).options() == EXPECTED


def test_without_a_warm_up_the_rates_are_the_recipes_constant_ones():
    options = job_of(distinct(warmup_updates=0)).options()
    assert EXPECTED.keys() - options.keys() == {"policy.scheduler", "value.scheduler"}


def test_each_key_is_one_that_nemo_rl_has_and_no_user_can_set_it_twice():
    placed = NEMO_RL.placement(1, 8, {})
    for name, value in EXPECTED.items():
        if name not in UNNAMED:
            assert value is None or not NEMO_RL.mistake(name, value), name
        free = name in NEMO_RL.options and not NEMO_RL.setter(name)
        recipe = name.startswith(REWARD) and value == NEMO_RL.options.get(name)
        assert not free or name in placed or recipe, name
    for name in NEMO_RL.set_by:
        assert any(f"{option}.".startswith(f"{name}.") for option in NEMO_RL.options), name


def test_the_options_of_the_user_replace_those_of_the_placement_and_of_the_recipe():
    options = {
        "env.reward_model.resources.gpus_per_node": 2,
        "env.reward_model.precision": "float32",
        "policy.dtensor_cfg.cpu_offload": True,
        "ppo.policy_training_start_step": 3,
    }
    params = distinct(engine_options=options, mini_batch_size=48)
    batches = {f"{role}.train_global_batch_size": 48 for role in ("policy", "value")}
    assert job_of(params).options() == EXPECTED | options | batches


def test_keys_that_the_recipe_for_ppo_does_not_name_are_added():
    added = {word.partition("=")[0] for word in job_of(distinct()).arguments() if word[0] == "+"}
    reward = {name for name in EXPECTED if name.startswith(REWARD)}
    assert added == {f"++{name}" for name in reward | UNNAMED - {"data.validation"}}


@pytest.fixture
def written(tmp_path, tiny_folder) -> NemoRlJob:
    """A job whose inputs are written, of a policy with two end tokens."""
    job = job_of(distinct(score_clip=2.0), tmp_path / "job", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    reward = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    reward.config.mean, reward.config.std = 1.5, 2.0
    reward.save_pretrained(job.reward)
    own = AutoTokenizer.from_pretrained(tiny_folder)
    own.bos_token = "<|endoftext|>"
    own.add_tokens(["<|of the reward model|>"])
    own.save_pretrained(job.reward)
    GenerationConfig(eos_token_id=[9, tokenizer.eos_token_id]).save_pretrained(job.sft)
    for left in ("states/step_2", "policies/step_2", "logs/exp_001/tensorboard"):
        (job.folder / left).mkdir(parents=True)
    job.write_prompts([{"prompt": "a cat", "id": "1"}, {"prompt": "it's", "id": "2"}], tokenizer)
    return job


def test_nothing_of_an_earlier_job_is_left_which_nemo_rl_would_continue(written):
    assert not any(path.exists() for path in (written.states, written.kept, written.logs))


def test_prompts_and_what_the_models_files_say(written):
    assert read_jsonl(written.prompts, "") == [
        {"input": "a cat", "output": ""},
        {"input": "it's", "output": ""},
    ]
    end = AutoTokenizer.from_pretrained(written.reward).eos_token_id
    assert json.loads((written.folder / "rondo_nemo_rl.json").read_text()) == [
        "ppo.reward_scaling.enabled=true",
        "ppo.reward_scaling.source_min=-2.5",  # 1.5 - 2 * 2
        "ppo.reward_scaling.source_max=5.5",
        "ppo.reward_scaling.target_min=-2.0",
        "ppo.reward_scaling.target_max=2.0",
        f"policy.generation.stop_token_ids=[{end},9]",
    ]


def test_nemo_rl_adds_no_bos_to_what_the_reward_model_reads(written):
    """The prompts have it where the model has one."""
    assert AutoTokenizer.from_pretrained(written.reward).bos_token == "<|endoftext|>"
    reader = AutoTokenizer.from_pretrained(written.reward_tokenizer)
    assert reader.bos_token is None
    text = "<|endoftext|>a<|of the reward model|>"
    ids = [
        AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
        for folder in (written.reward, written.reward_tokenizer)
    ]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 3


def test_the_critics_values_are_calibrated_scores(written):
    check_critic(written)


def test_a_cluster_without_a_checkout_is_refused(written):
    result = subprocess.run(
        [sys.executable, str(written.driver)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "python3 of the Ray cluster has no checkout of NeMo RL" in result.stderr


def test_the_command_runs_that_of_nemo_rl_with_all_overrides_and_has_its_exit_code(
    written, tmp_path
):
    """The version of a checkout has its commit, too."""
    folder = tmp_path / "environment"
    install(folder, recorded_versions() | {"nemo_rl": f"{NEMO_RL.version}+1a2b3c4"})
    program = "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(3)"
    (folder / "examples/run_ppo.py").write_text(program)
    status = os.system(f"PYTHONPATH={shlex.quote(str(folder))} {written.command()}")
    assert os.waitstatus_to_exitcode(status) == 3
    option, recipe, *overrides = json.loads(written.log.read_text())
    assert (option, recipe) == ("--config", str(folder / RECIPE))
    from_files = json.loads((written.folder / "rondo_nemo_rl.json").read_text())
    assert overrides == written.arguments() + from_files


def write_events(job: NemoRlJob, tags: dict[str, float], step: int) -> None:
    writer = SummaryWriter(log_dir=str(job.events))
    for tag, value in tags.items():
        writer.add_scalar(tag, value, step)
    writer.close()


def test_an_update_counts_once_all_its_metrics_are_there(tmp_path):
    """NeMo RL writes those of the rollout first; sums of three mini-batches become means."""
    job = job_of(distinct(), tmp_path)
    metrics = EngineMetrics(job)
    assert metrics.read() == []
    rollout = {"train/mean_gen_tokens_per_sample": 8.0, "train/truncation_rate": 0.25}
    write_events(job, rollout, 1)
    assert metrics.read() == []
    end = {"timing/train/total_step_time": 9.0}
    training = {"train/loss": 3.0, "train/critic/loss": 1.5, "train/approx_entropy": 6.0}
    write_events(job, rollout | training | {"train/reward": 0.5, "train/lr": 0.125} | end, 1)
    write_events(job, rollout, 2)
    assert metrics.read() == [
        {
            "step": 1,
            "policy_loss": 1.0,
            "value_loss": 0.5,
            "entropy": 2.0,
            "score_mean": 0.5,
            "learning_rate": 0.125,
            "response_length": 8.0,
            "eos_rate": 0.75,
        }
    ]


def test_policies_are_those_that_are_converted(tmp_path):
    job = job_of(make(launcher={"gpus_per_node": 2}), tmp_path)
    for name in ("policies/step_5", "policies/part-step_10", "states/step_10"):
        (tmp_path / name).mkdir(parents=True)
    assert job.policies(10, ended=False) == {5: tmp_path / "policies/step_5"}


@pytest.mark.parametrize("key", ["entropy_coef", "length_penalty", "missing_eos_penalty"])
def test_what_nemo_rl_does_not_have_is_refused(key):
    with pytest.raises(BadInput, match=rf"engine nemo_rl needs ppo\.{key}=0\.0"):
        make(ppo={key: 0.1}, launcher={"gpus_per_node": 2})
