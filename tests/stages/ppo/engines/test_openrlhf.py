"""OpenRLHF's command line, prompts and files. Expected values are written by hand from the source
of the recorded version.
"""

import json
import os
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.openrlhf import OPENRLHF
from stages.ppo.engines.job import EngineMetrics
from stages.ppo.engines.openrlhf import OpenRlhfJob, arguments
from tests.engine_settings import NEEDED
from tests.stages.ppo.engines.openrlhf_parser import OpenRlhf
from tests.stages.ppo.engines.stand_in.install import install, recorded_versions

WHEEL = os.environ.get("OPENRLHF_WHEEL", "")
needs_wheel = pytest.mark.skipif(
    not WHEEL, reason="needs OpenRLHF's wheel: make test-engines downloads it"
)


def make(**sections: Any) -> Params:
    ppo = NEEDED | {"micro_batch_size": 2} | sections.pop("ppo", {})
    launcher = {"ray_address": "http://ray:8265"} | sections.pop("launcher", {})
    return check_params({"ppo": ppo, "launcher": launcher} | sections, "test")


def job_of(params: Params, folder: Path = Path("/work")) -> OpenRlhfJob:
    return OpenRlhfJob(params, folder, Path("/sft"), Path("/reward"))


def chosen(params: Params) -> dict[str, Any]:
    return job_of(params).options()


DISTINCT = {
    "batch_size": 48,
    "mini_batch_size": 16,
    "micro_batch_size": 2,
    "total_episodes": 480,
    "num_ppo_epochs": 3,
    "response_length": 100,
    "temperature": 0.7,
    "learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "warmup_updates": 2,
    "max_grad_norm": 0.5,
    "gamma": 0.99,
    "lam": 0.9,
    "cliprange": 0.15,
    "cliprange_value": 0.3,
    "entropy_coef": 0.001,
    "kl_coef": 0.02,
    "score_clip": 4.0,
    "validation_updates": 5,
    "gradient_checkpointing": True,
}


def test_each_setting_goes_to_the_option_that_means_it():
    params = make(
        ppo=DISTINCT, prepare={"max_prompt_tokens": 64}, seed=7, launcher={"gpus_per_node": 4}
    )
    expected = {
        "actor.model_name_or_path": "/sft",
        "reward.model_name_or_path": "/reward",
        "critic.model_name_or_path": "/reward",
        "reward.normalize_enable": True,
        "reward.clip_range": [-4.0, 4.0],
        "data.prompt_dataset": "/work/prompts.jsonl",
        "data.input_key": "prompt",
        "data.max_len": 164,
        "rollout.batch_size": 48,
        "rollout.micro_batch_size": 2,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": 100,
        "rollout.temperature": 0.7,
        "rollout.top_p": 1.0,
        "train.num_episodes": 1,
        "train.batch_size": 16,
        "train.micro_batch_size": 2,
        "train.max_epochs": 3,
        "train.seed": 7,
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": 0.99,
        "algo.advantage.lambd": 0.9,
        "algo.kl.init_coef": 0.02,
        "algo.kl.estimator": "k1",
        "actor.adam.lr": 1e-6,
        "actor.eps_clip": 0.15,
        "actor.entropy_coef": 0.001,
        "actor.max_norm": 0.5,
        "actor.lr_warmup_ratio": 0.2,
        "actor.gradient_checkpointing_enable": True,
        "critic.adam.lr": 9e-6,
        "critic.value_clip": 0.3,
        "critic.max_norm": 0.5,
        "critic.lr_warmup_ratio": 0.2,
        "critic.save_value_network": True,
        "ckpt.path": "/work/states",
        "ckpt.output_dir": "/work/final",
        "ckpt.save_steps": 5,
        "ckpt.save_hf": True,
        "ckpt.max_num": 1,
        "ckpt.load_enable": False,
        "logger.tensorboard_dir": "/work/tensorboard",
        "logger.wandb.run_name": "rondo",
        # all models on all GPUs
        "train.colocate_all": True,
        "vllm.num_engines": 4,
        "vllm.tensor_parallel_size": 1,
        "vllm.enable_sleep": True,
        "vllm.gpu_memory_utilization": 0.6,
        "ds.enable_sleep": True,
        "ds.zero_stage": 3,
        "ds.packing_samples": True,
    }
    for role in ("actor", "ref", "critic", "reward"):
        expected |= {f"{role}.num_nodes": 1, f"{role}.num_gpus_per_node": 4}
    assert chosen(params) == expected


def test_a_job_with_a_checkpoint_continues_from_it(tmp_path):
    job = job_of(make(), tmp_path)
    assert job.options()["ckpt.load_enable"] is False
    (job.states / "_actor").mkdir(parents=True)
    assert job.options()["ckpt.load_enable"] is True


def test_the_options_of_the_user_are_added_or_replace_those_of_the_placement():
    params = make(ppo={"engine_options": {"vllm.tensor_parallel_size": 2, "ds.zero_stage": 2}})
    made = chosen(params)
    assert made["ds.zero_stage"] == 2
    assert (made["vllm.num_engines"], made["vllm.tensor_parallel_size"]) == (4, 2)


def test_each_option_is_one_that_the_engine_has_and_no_user_can_set_it_twice():
    placed = OPENRLHF.placement(1, 8, {})
    for name, value in chosen(make(ppo=DISTINCT, launcher={"gpus_per_node": 4})).items():
        assert not OPENRLHF.mistake(name, value), name
        assert (name in OPENRLHF.set_by) != (name in placed), name
    assert set(OPENRLHF.set_by) <= set(OPENRLHF.options)


def test_a_switch_is_there_or_not_and_a_list_is_many_words():
    assert arguments({"a": True, "b": False, "c": [-5.0, 5.0], "d": "x y"}) == [
        *("--a", "--c", "-5.0", "5.0", "--d", "x y")
    ]


def test_the_command_is_quoted_for_the_shell(tmp_path):
    """The program is replaced by one that prints its arguments, as JSON in one line."""
    install(tmp_path, recorded_versions())
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    (tmp_path / "openrlhf/cli/train_ppo_ray.py").write_text(program)
    job = job_of(make(ppo={"engine_options": {"data.label_key": "it's $HOME"}}), tmp_path / "a b")
    job.folder.mkdir()
    assert os.system(f"PYTHONPATH={shlex.quote(str(tmp_path))} {job.command()}") == 0
    words = json.loads(job.log.read_text())
    assert words == arguments(job.options())
    assert words[words.index("--data.label_key") + 1] == "it's $HOME"


class Letters:
    """A tokenizer whose tokens are letters, but for `th`, which is one."""

    bos_token, bos_token_id, eos_token_id = None, None, 0

    def __call__(self, text: Any, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        if isinstance(text, list):
            rows = [self(one, add_special_tokens).input_ids for one in text]
            return SimpleNamespace(input_ids=rows)
        return SimpleNamespace(input_ids=[ord(letter) for letter in text.replace("th", "θ")])


def test_prompts_are_those_of_all_updates_in_passes_over_all_prompts(tmp_path):
    params = make(ppo={"batch_size": 16, "mini_batch_size": 16, "micro_batch_size": 2})
    params.ppo.total_episodes = 40  # two updates
    words = ["cat", "dog", "the", "hen"]
    episodes = [({"id": word, "prompt": word}, [ord(x) for x in word]) for word in words]
    assert job_of(params, tmp_path).write_inputs(episodes, Letters()) == 1
    rows = read_jsonl(tmp_path / "prompts.jsonl", "")
    assert len(rows) == 32
    assert sorted(Counter(row["prompt"] for row in rows).values()) == [10, 11, 11]
    passes = [tuple(row["id"] for row in rows[at : at + 3]) for at in range(0, 30, 3)]
    assert all(sorted(one) == ["cat", "dog", "hen"] for one in passes)
    assert len(set(passes)) > 1
    job_of(params, tmp_path / "again").write_inputs(episodes, Letters())
    assert read_jsonl(tmp_path / "again/prompts.jsonl", "") == rows


def test_prompts_that_are_all_read_otherwise_are_refused(tmp_path):
    episodes = [({"id": "1", "prompt": "the"}, [116, 104, 101])]
    with pytest.raises(BadInput, match=r"raise prepare\.max_prompt_tokens"):
        job_of(make(), tmp_path).write_inputs(episodes, Letters())


def test_a_checkpoint_counts_once_the_next_update_is_known(tmp_path):
    job = job_of(make(), tmp_path)
    for name in ("global_step5_hf", "global_step10_hf", "_actor"):
        (job.states / name).mkdir(parents=True)
    assert list(job.policies(5, ended=False)) == []
    assert list(job.policies(10, ended=False)) == [5]
    assert job.policies(12, ended=True) == {
        5: job.states / "global_step5_hf",
        10: job.states / "global_step10_hf",
        12: job.final,
    }


def write_events(job: OpenRlhfJob, steps: list[tuple[int, float]]) -> None:
    writer = SummaryWriter(log_dir=f"{job.folder}/tensorboard/rondo")
    for step, kl in steps:
        writer.add_scalar("train/kl", kl, step)
        writer.add_scalar("train/rollout/truncated_rate", 0.25, step)
        writer.add_scalar("train/timing/generation", 1.0, step)
    writer.close()


def test_metrics_have_our_names_and_of_an_update_made_twice_the_later_one_counts(tmp_path):
    job = job_of(make(), tmp_path)
    metrics = EngineMetrics(job)
    assert metrics.read() == []
    write_events(job, [(1, 0.5), (2, 1.0), (3, 1.5)])
    assert metrics.read() == [
        {"step": 1, "kl_per_token": 0.5, "eos_rate": 0.75},
        {"step": 2, "kl_per_token": 1.0, "eos_rate": 0.75},
        {"step": 3, "kl_per_token": 1.5, "eos_rate": 0.75},
    ]
    write_events(job, [(3, 2.5), (4, 3.0)])  # a job that was resumed after update 2
    assert [row["kl_per_token"] for row in metrics.read()] == [0.5, 1.0, 2.5, 3.0]


def test_an_update_of_which_a_part_is_written_waits_for_the_rest(tmp_path):
    """The writer's buffer is written to the file whenever it is full."""
    job = job_of(make(), tmp_path)
    metrics, writer = EngineMetrics(job), SummaryWriter(log_dir=f"{job.folder}/tensorboard/rondo")

    def write(step: int, *tags: str) -> list[float]:
        for tag in tags:
            writer.add_scalar(f"train/{tag}", 0.5, step)
        writer.flush()
        return [row["step"] for row in metrics.read()]

    assert write(1, "kl") == [] and write(1, "entropy_loss") == []
    assert write(2, "entropy_loss") == [1]
    assert write(2, "kl") == [1, 2]
    assert write(3, "kl") == [1, 2]
    writer.close()
    assert [row["step"] for row in metrics.read()] == [1, 2]  # the job has failed, or goes on
    assert [row["step"] for row in metrics.read(ended=True)] == [1, 2, 3]


@needs_wheel
def test_the_recorded_options_are_those_of_the_wheel():
    real = OpenRlhf(Path(WHEEL))
    assert (real.version, real.options()) == (OPENRLHF.version, OPENRLHF.options)


@needs_wheel
def test_the_wheel_reads_the_command_as_it_is_meant():
    made = chosen(make(ppo=DISTINCT, launcher={"gpus_per_node": 4}))
    parsed = OpenRlhf(Path(WHEEL)).parse(arguments(made))
    for name, value in made.items():
        read: Any = parsed
        for part in name.split("."):
            read = getattr(read, part)
        assert read == value, name


@needs_wheel
def test_what_is_accepted_here_the_wheel_accepts():
    """Each option with each of these values: either it is refused before the run, or the wheel's
    own parser and its checks take it, as this value.
    """
    real, refused, taken = OpenRlhf(Path(WHEEL)), 0, 0
    values: list[Any] = [True, False, 3, 1, 0, -1, 0.5, "word", "", [1, 2], ["a", "b"], []]
    for name in OPENRLHF.options:
        for value in values:
            try:
                params = make(ppo={"engine_options": {name: value}})
            except BadInput:
                refused += 1
                continue
            taken += 1
            read: Any = real.parse(arguments(chosen(params)))
            for part in name.replace("no_nesterov", "nesterov").split("."):
                read = getattr(read, part)
            if name.endswith("no_nesterov"):
                read = not read
            assert read == value or (isinstance(value, list) and [*read] == value), (name, value)
    assert refused > 1000
    assert taken > 250


@pytest.mark.parametrize("name", ["ds.zero_stag", "zero_stage", "--ds.zero_stage", "help"])
def test_an_abbreviated_or_unknown_option_is_refused(name):
    with pytest.raises(BadInput, match="has no such option"):
        make(ppo={"engine_options": {name: 1}})
