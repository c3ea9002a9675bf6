"""NeMo RL's options, prompts, critic and files. Expected values are written by hand from the source
of the pinned version.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoTokenizer, GenerationConfig

from stages.lib.core.files import read_jsonl
from stages.ppo.engines.job import EngineMetrics
from stages.ppo.engines.nemo_rl import NemoRlJob
from tests.stages.ppo.engines.jobs import (
    distinct,
    job_of,
    save_reward_model,
    settings,
)


def test_settings_without_an_option_of_the_same_meaning():
    params = distinct("nemo_rl", gpus=8, entropy_coef=0.0)
    options = job_of(params).options()
    # 2 updates of 3 epochs: 1/7, 2/7, ... 7/7
    rise = {"start_factor": pytest.approx(1 / 7), "total_iters": 6}
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": rise}
    expected = {
        "policy.model_name": "/sft",
        "policy.max_total_sequence_length": 228,  # 64 of the prompt, 100, and 64 for a message
        "policy.scheduler": [linear, {"milestones": []}],
        "value.model_name": "/work/critic",
        "value.tokenizer.name": "/sft",
        "value.scheduler": [linear, {"milestones": []}],
        "value_loss_fn.scale": 1.0,
        "loss_fn.use_kl_in_reward": True,
        "loss_fn.reference_policy_kl_type": "k1",
        "loss_fn.ratio_clip_c": None,
        "ppo.skip_reference_policy_logprobs_calculation": False,
        "ppo.reward_shaping.enabled": False,
        "ppo.seed": 7,
        "ppo.num_generations_per_prompt": 1,
        "ppo.max_num_epochs": 1,
        "ppo.max_num_steps": 10,
        "++data.train.data_path": "/work/prompts.jsonl",
        "data.shuffle": False,
        "data.max_input_seq_length": 65,
        "++data.env_name": "reward_model",
        "checkpointing.checkpoint_dir": "/work/states",
        "checkpointing.keep_top_k": None,
        "logger.log_dir": "/work/logs",
        "env.reward_model.model_name": "/reward",
        "env.reward_model.tokenizer.name": "/work/reward_tokenizer",
        "env.reward_model.max_model_len": 165,
        "env.reward_model.resources.gpus_per_node": 4,
        "env.reward_model.resources.num_nodes": 1,
    }
    assert {name: options[name] for name in expected} == expected
    params.ppo.warmup_updates = 0  # then the rates are the recipe's constant ones
    constant = job_of(params).options()
    assert options.keys() - constant.keys() == {"policy.scheduler", "value.scheduler"}


def test_the_recipe_for_ppo_has_no_reward_model_so_that_its_keys_are_added():
    params = settings("nemo_rl", engine_options={"env.reward_model.precision": "float32"})
    words = job_of(params).arguments()
    assert "++env.reward_model.precision='float32'" in words
    assert not [word for word in words if word.startswith("env.")]


def test_the_reward_model_has_half_of_one_node_or_a_node_of_many():
    for nodes, gpus in ((1, 4), (2, 8)):
        options = job_of(settings("nemo_rl", nodes=nodes)).options()
        assert options["env.reward_model.resources.num_nodes"] == 1
        assert options["env.reward_model.resources.gpus_per_node"] == gpus


@pytest.fixture
def written(tmp_path, tiny_folder) -> NemoRlJob:
    """A job whose inputs are written, of a policy with two end tokens."""
    job = job_of(settings("nemo_rl", score_clip=2.0), tmp_path / "job", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    save_reward_model(job.reward, tiny_folder)
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
    assert (written.critic_start / "model.safetensors").exists()
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


def test_a_cluster_without_a_checkout_is_refused(written):
    result = subprocess.run(
        [sys.executable, str(written.folder / written.plugin)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "python3 of the Ray cluster has no checkout of NeMo RL" in result.stderr


RUN = """
import json, sys
from pathlib import Path
print(json.dumps(sys.argv[1:]))
for step in (2, 10):  # in the making, and then complete
    folder = Path(STATES, f"tmp_step_{step}")
    (folder / "policy/weights").mkdir(parents=True)
    folder.rename(Path(STATES, f"step_{step}"))
sys.exit(3)
"""
CONVERT = """
import argparse, shutil
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("config", "dcp-ckpt-path", "hf-ckpt-path"):
    parser.add_argument(f"--{name}", type=Path, required=True)
paths = parser.parse_args()
assert paths.config.parent == paths.dcp_ckpt_path.parents[1] and paths.dcp_ckpt_path.is_dir()
paths.hf_ckpt_path.mkdir()
shutil.copy(PICKLED, paths.hf_ckpt_path / "pytorch_model.bin")
"""


def test_the_driver_runs_nemo_rl_and_makes_each_checkpoint_a_policy(written, tmp_path):
    """With programs in the place of NeMo RL's: the exit code is that of the training."""
    checkout, pickled = tmp_path / "checkout", tmp_path / "weights.bin"
    torch.save({"w": torch.ones(2, 3).T}, pickled)
    files = {
        "nemo_rl/__init__.py": "",
        "examples/configs/ppo_math_1B.yaml": "",
        "examples/run_ppo.py": RUN.replace("STATES", repr(str(written.states))),
        "examples/converters/convert_dcp_to_hf.py": CONVERT.replace("PICKLED", repr(str(pickled))),
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    result = subprocess.run(
        [sys.executable, *written.words()[1:]],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3, result.stderr
    option, recipe, *overrides = json.loads(result.stdout)
    assert (option, recipe) == ("--config", str(checkout / "examples/configs/ppo_math_1B.yaml"))
    from_files = json.loads((written.folder / "rondo_nemo_rl.json").read_text())
    assert overrides == written.arguments() + from_files
    policies = written.policies(10, ended=False)
    assert sorted(policies) == [2, 10]
    assert not list(written.states.iterdir())
    for folder in policies.values():
        assert load_file(folder / "model.safetensors")["w"].tolist() == [[1.0, 1.0]] * 3
        assert not (folder / "pytorch_model.bin").exists()


def write_events(job: NemoRlJob, tags: dict[str, float], step: int) -> None:
    writer = SummaryWriter(log_dir=str(job.events))
    for tag, value in tags.items():
        writer.add_scalar(tag, value, step)
    writer.close()


def test_an_update_counts_once_all_its_metrics_are_there(tmp_path):
    """NeMo RL writes those of the rollout first; sums of three mini-batches become means."""
    job = job_of(distinct("nemo_rl", gpus=8, entropy_coef=0.0), tmp_path)
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
    job = job_of(settings("nemo_rl"), tmp_path)
    for name in ("policies/step_5", "policies/part-step_10", "states/step_10"):
        (tmp_path / name).mkdir(parents=True)
    assert job.policies(10, ended=False) == {5: tmp_path / "policies/step_5"}
