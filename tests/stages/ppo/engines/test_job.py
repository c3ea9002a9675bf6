"""What the jobs of all engines share: options, the command, prompts and metrics."""

import json
import os
import re
import shlex
from collections import Counter
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
)

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.ppo.engines import JOBS
from stages.ppo.engines.job import EngineMetrics, write_critic
from stages.ppo.engines.openrlhf import arguments
from tests.paths import ROOT
from tests.stages.ppo.engines.jobs import (
    Letters,
    distinct,
    install,
    job_of,
    save_reward_model,
    settings,
)

ACTOR, REWARD = "actor_rollout_ref.actor", "env.reward_model"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
SHORT = {"A": ACTOR, "R": "actor_rollout_ref.rollout", "P": "policy", "V": "value", "E": REWARD}


def documented(engine: str) -> list[tuple[str, str]]:
    """The table of docs/engines.md: keys of params.yaml, and patterns of an engine's options."""
    lines = (ROOT / "docs/engines.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| Rondo | Open"))
    rows = [line.split("|")[1:-1] for line in lines[start + 2 :]]
    rows = rows[: rows.index([])]
    column = 1 + list(JOBS).index(engine)
    pairs = []
    for row in rows:
        [key] = re.findall("`(.*?)`", row[0])
        for pattern in re.findall("`(.*?)`", row[column]):
            first, dot, rest = pattern.partition(".")
            pairs.append(
                (key if "." in key else f"ppo.{key}", SHORT.get(first, first) + dot + rest)
            )
    return pairs


@pytest.mark.parametrize("engine", JOBS)
def test_each_setting_goes_to_the_options_that_the_documentation_names(engine):
    """No two settings have the same value."""
    none = {"entropy_coef": 0.0} if engine == "nemo_rl" else {}
    params = distinct(engine, gpus=4 if engine == "verl" else 8, **none)
    options = job_of(params).options()
    pairs = documented(engine)
    assert len(pairs) >= 19
    for key, pattern in pairs:
        values = [options[name] for name in options if fnmatchcase(name, pattern)]
        assert values and set(values) == {attrgetter(key)(params)}, (key, pattern)


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("openrlhf", "actor.adam.lr"),
        ("openrlhf", "train.async_enable"),
        ("verl", f"{ACTOR}.optim.lr"),
        ("verl", f"+{ACTOR}.optim.lr"),
        ("verl", f"{ACTOR}.checkpoint.async_save"),
        ("verl", "algorithm.filter_groups.enable"),
        ("verl", "trainer.use_v1"),
        ("verl", "reward.reward_model.rollout.name"),
        ("nemo_rl", "loss_fn.kl_output_clamp_value"),
        ("nemo_rl", "policy.generation.top_p"),
        ("nemo_rl", "policy.generation.vllm_cfg.async_engine"),
        ("nemo_rl", f"{REWARD}.batch_size"),
        ("nemo_rl", "++data.env_name"),
    ],
)
def test_an_option_that_rondo_sets_or_needs_as_it_is_is_refused(engine, option):
    with pytest.raises(BadInput, match="or needs it as it is: remove it here") as refusal:
        job_of(settings(engine, engine_options={option: 1})).check()
    assert f"ppo.engine_options.{option}:" in str(refusal.value)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("openrlhf", {"vllm.tensor_parallel_size": 2, "ds.zero_stage": 2}),
        ("verl", {"trainer.critic_warmup": 3, "reward.reward_model.rollout.dtype": "half"}),
        ("verl", {"+actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}),
        ("nemo_rl", {f"{REWARD}.resources.gpus_per_node": 2, f"{REWARD}.precision": "float32"}),
        ("nemo_rl", {"policy.generation.vllm_cfg.enforce_eager": True}),
    ],
)
def test_other_options_are_added_or_replace_those_of_the_placement(engine, options):
    job = job_of(settings(engine, mini_batch_size=24, batch_size=24, engine_options=options))
    plain = job_of(settings(engine, mini_batch_size=24, batch_size=24))
    assert options.items() <= job.options().items()
    different = {
        name for name, value in job.options().items() if plain.options().get(name) != value
    }
    assert different - {"vllm.num_engines"} == set(options)


def test_no_option_that_a_user_may_replace_is_one_that_rondo_sets():
    for engine in JOBS:
        job = job_of(settings(engine))
        assert not set(job.placement()) & set(job.chosen())


@pytest.mark.parametrize(
    ("engine", "more", "workers"),
    [
        ("openrlhf", {"gpus": 3}, "the 3 data-parallel workers of the actor"),
        ("openrlhf", {"engine_options": {"critic.num_gpus_per_node": 3}}, "the 3 .* of the critic"),
        ("verl", {"nodes": 3}, "the 24 data-parallel workers of the actor"),
        (
            "verl",
            {"gpus": 4, "engine_options": {ULYSSES: 8}},
            "0 ",
        ),
        ("nemo_rl", {"gpus": 1}, "the 0 data-parallel workers of the policy"),
        ("nemo_rl", {"nodes": 4}, "the 24 data-parallel workers of the policy"),
        ("nemo_rl", {"engine_options": {f"{REWARD}.resources.gpus_per_node": 5}}, "the 3 "),
    ],
)
def test_workers_that_do_not_get_whole_micro_batches_are_refused(engine, more, workers):
    with pytest.raises(
        BadInput, match=f"mini_batch_size 32 must be a multiple of .* 2 .*{workers}"
    ):
        job_of(settings(engine, **more)).check()


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("openrlhf", {"ds.ring_attn_size": 2}),
        ("verl", {ULYSSES: 2}),
        ("nemo_rl", {"policy.dtensor_cfg.context_parallel_size": 2}),
    ],
)
def test_gpus_that_share_a_sequence_are_one_worker(engine, options):
    params = settings(engine, gpus=16 if engine == "nemo_rl" else 8, micro_batch_size=8)
    params.ppo.engine_options = options
    roles = {"openrlhf": ("actor", "critic"), "verl": ("actor",), "nemo_rl": ("policy",)}
    assert [job_of(params).workers()[role] for role in roles[engine]] == [4] * len(roles[engine])


def test_the_command_is_quoted_for_the_shell(tmp_path):
    """OpenRLHF's program is replaced by one that prints its arguments, as JSON in one line."""
    install(tmp_path, openrlhf="0.11.2+1a2b3c4")
    (tmp_path / "openrlhf/cli/train_ppo_ray.py").write_text(
        "import json\ndef train(args):\n    print(json.dumps(args))\n"
        "if __name__ == '__main__':\n    import sys\n    train(sys.argv[1:])\n"
    )
    params = settings("openrlhf", engine_options={"data.label_key": "it's $HOME"})
    job = job_of(params, tmp_path / "a b")
    assert os.system(f"PYTHONPATH={shlex.quote(str(tmp_path))} {job.command()}") == 0
    words = json.loads(job.log.read_text())
    assert words == arguments(job.options())
    assert words[words.index("--data.label_key") + 1] == "it's $HOME"


def test_prompts_are_those_of_all_updates_in_passes_over_all_prompts(tmp_path):
    params = settings("openrlhf", batch_size=16, mini_batch_size=16)
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
        job_of(settings("openrlhf"), tmp_path).write_inputs(episodes, Letters())


def test_the_critics_values_are_calibrated_scores(tmp_path, tiny_folder):
    save_reward_model(tmp_path / "reward", tiny_folder)
    write_critic(tmp_path / "reward", tmp_path / "critic", "verl")
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        raw, values = reward(tokens).logits[0], critic(tokens).logits[0, -1]
    torch.testing.assert_close(values, (raw - 1.5) / 2.0)
    assert raw.abs() > 1e-4


def test_a_model_whose_critic_could_not_start_from_its_rewards_is_refused(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    GPTNeoXForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    with pytest.raises(BadInput, match="GPTNeoXForTokenClassification cannot start from a reward"):
        write_critic(tmp_path / "reward", tmp_path / "critic", "verl")
    assert not (tmp_path / "critic").exists()


def write_events(job: Any, steps: list[tuple[int, float]]) -> None:
    writer = SummaryWriter(log_dir=f"{job.folder}/tensorboard/rondo")
    for step, kl in steps:
        writer.add_scalar("train/kl", kl, step)
        writer.add_scalar("train/rollout/truncated_rate", 0.25, step)
        writer.add_scalar("train/timing/generation", 1.0, step)
    writer.close()


def test_metrics_have_our_names_and_of_an_update_made_twice_the_later_one_counts(tmp_path):
    job = job_of(settings("openrlhf"), tmp_path)
    metrics = EngineMetrics(job)
    assert metrics.read() == []
    write_events(job, [(1, 0.5), (2, 1.0), (3, 1.5)])
    assert metrics.read() == [
        {"step": 1, "kl_per_token": 0.5, "eos_rate": 0.75},
        {"step": 2, "kl_per_token": 1.0, "eos_rate": 0.75},
        {"step": 3, "kl_per_token": 1.5, "eos_rate": 0.75},
    ]
    # a job that was resumed after update 2, and killed before it wrote those of update 4
    write_events(job, [(3, 2.5), (5, 3.0)])
    assert [(row["step"], row["kl_per_token"]) for row in metrics.read()] == [
        *((1, 0.5), (2, 1.0), (3, 2.5), (5, 3.0))
    ]


def test_an_update_of_which_a_part_is_written_waits_for_the_rest(tmp_path):
    """The writer's buffer is written to the file whenever it is full."""
    job = job_of(settings("openrlhf"), tmp_path)
    metrics, writer = EngineMetrics(job), SummaryWriter(log_dir=f"{job.folder}/tensorboard/rondo")

    def write(step: int, *tags: str) -> list[float]:
        for tag in tags:
            writer.add_scalar(f"train/{tag}", 0.5, step)
        writer.flush()
        return [row["step"] for row in metrics.read()]

    assert write(1, "kl") == [] and write(1, "entropy_loss") == []
    assert [row["step"] for row in metrics.read(ended=True)] == [1]  # of a single update
    assert write(2, "entropy_loss") == [1]
    assert write(2, "kl") == [1, 2]
    assert write(3, "kl") == [1, 2]
    writer.close()
    assert [row["step"] for row in metrics.read()] == [1, 2]  # the job has failed, or goes on
    assert [row["step"] for row in metrics.read(ended=True)] == [1, 2, 3]
