"""OpenRLHF's options and files. Expected values are written by hand from the source of the pinned
version; `make test-engines` names its wheel, whose own parser reads them.
"""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from stages.ppo.engines import rondo_check
from stages.ppo.engines.openrlhf import OpenRlhfJob, arguments
from tests.stages.ppo.engines.jobs import distinct, install, job_of, settings

WHEEL = os.environ.get("OPENRLHF_WHEEL", "")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="needs OpenRLHF's wheel: make test-engines")


def test_settings_without_an_option_of_the_same_meaning():
    options = job_of(distinct("openrlhf", gpus=4)).options()
    expected = {
        "actor.model_name_or_path": "/sft",
        "reward.model_name_or_path": "/reward",
        "critic.model_name_or_path": "/reward",
        "reward.normalize_enable": True,
        "reward.clip_range": [-4.0, 4.0],
        "data.max_len": 164,
        "rollout.n_samples_per_prompt": 1,
        "rollout.top_p": 1.0,
        "train.num_episodes": 1,
        "train.seed": 7,
        "algo.advantage.estimator": "gae",
        "algo.kl.estimator": "k1",
        "actor.lr_warmup_ratio": 0.2,
        "critic.lr_warmup_ratio": 0.2,
        "ckpt.save_hf": True,
        "ckpt.max_num": 1,
        "train.colocate_all": True,
        "vllm.num_engines": 4,
    }
    assert expected.items() <= options.items()


def test_a_job_with_a_checkpoint_continues_from_it(tmp_path):
    job = job_of(settings("openrlhf"), tmp_path)
    assert job.options()["ckpt.load_enable"] is False
    (job.states / "_actor").mkdir(parents=True)
    assert job.options()["ckpt.load_enable"] is True


def test_another_version_is_refused(tmp_path):
    install(tmp_path, openrlhf="0.11.1")
    job = job_of(settings("openrlhf"), tmp_path / "job")
    path = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(job.check_command(), shell=True, env=os.environ | path, check=False)
    assert result.returncode == 1
    assert job.refusal.read_text() == (
        "the Ray cluster has openrlhf 0.11.1, and Rondo needs 0.11.2"
    )


def test_vllm_has_an_engine_per_group_of_gpus():
    options = job_of(
        settings("openrlhf", engine_options={"vllm.tensor_parallel_size": 2})
    ).options()
    assert (options["vllm.num_engines"], options["vllm.tensor_parallel_size"]) == (4, 2)


def test_a_switch_is_there_or_not_and_a_list_is_many_words():
    assert arguments({"a": True, "b": False, "c": [-5.0, 5.0], "d": "x y"}) == [
        *("--a", "--c", "-5.0", "5.0", "--d", "x y")
    ]


def test_a_checkpoint_counts_once_the_next_update_is_known(tmp_path):
    job = job_of(settings("openrlhf"), tmp_path)
    for name in ("global_step5_hf", "global_step10_hf", "_actor"):
        (job.states / name).mkdir(parents=True)
    assert list(job.policies(5, ended=False)) == []
    assert list(job.policies(10, ended=False)) == [5]
    assert job.policies(12, ended=True) == {
        5: job.states / "global_step5_hf",
        10: job.states / "global_step10_hf",
        12: job.final,
    }


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """OpenRLHF as if installed."""
    with ZipFile(WHEEL) as archive:
        archive.extractall(tmp_path)
    [folder] = [path.parents[1] for path in tmp_path.rglob("cli/train_ppo_ray.py")]
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray"])
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    return folder.parent


@needs_wheel
def test_the_wheel_reads_the_command_as_it_is_meant(wheel):
    assert Path(WHEEL).name.split("-")[1] == OpenRlhfJob.version
    job = job_of(distinct("openrlhf", gpus=4))
    parsed = rondo_check.openrlhf(job.arguments())
    for name, value in job.options().items():
        read = parsed
        for part in name.split("."):
            read = getattr(read, part)
        assert read == value, name


@needs_wheel
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ds.zero_stag": 2}, "unrecognized arguments: --ds.zero_stag 2"),
        ({"--ds.zero_stage": 2}, "unrecognized arguments: ----ds.zero_stage 2"),
        ({"help": True}, "unrecognized arguments: --help"),
        ({"ds.zero_stage": 2.5}, "argument --ds.zero_stage: invalid int value: '2.5'"),
        ({"ds.overlap_comm": 1}, "unrecognized arguments: 1"),
        ({"ds.param_dtype": "fp32"}, "argument --ds.param_dtype: invalid choice: 'fp32'"),
        (
            {"algo.advantage.is_correction_threshold": [1, 2, 3]},
            "--algo.advantage.is_correction_threshold takes HIGH or LOW HIGH",
        ),
    ],
)
def test_the_wheels_own_words_are_the_refusal(wheel, tmp_path, options, message):
    """In a process of its own, as on the cluster."""
    job = job_of(settings("openrlhf", engine_options=options), tmp_path / "job")
    path = {"PYTHONPATH": f"{wheel}:{tmp_path}"}
    result = subprocess.run(job.check_command(), shell=True, env=os.environ | path, check=False)
    assert result.returncode == 1
    assert job.refusal.read_text().startswith(message)
