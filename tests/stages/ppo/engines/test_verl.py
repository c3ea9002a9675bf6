"""verl's options, prompts, critic and files, and what verl loads from the job's folder. Expected
values are written by hand from the source of the pinned version.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import GenerationConfig

from stages.lib.core.files import read_json
from stages.lib.lm.end_tokens import EndTokens
from stages.ppo.common.rewards import shape_scores
from stages.ppo.engines.job import EngineMetrics
from stages.ppo.engines.verl import ACTOR, MODEL, ROLLOUT, VerlJob
from tests.stages.ppo.engines.jobs import (
    Letters,
    distinct,
    job_of,
    save_reward_model,
    settings,
)


def test_settings_without_an_option_of_the_same_meaning():
    options = job_of(distinct("verl", gpus=4)).options()
    expected = {
        f"{MODEL}.path": "/sft",
        f"{MODEL}.custom_chat_template": "{{ messages[0]['content'] }}",
        "critic.model.path": "/work/critic",
        "critic.model.tokenizer_path": "/reward",
        "critic.optim.lr_warmup_steps": 2,
        f"{ACTOR}.optim.lr_warmup_steps": 2,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.use_kl_loss": False,
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.max_model_len": 164,
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "fixed",
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "/reward",
        "reward.reward_model.rollout.max_model_len": 165,
        "reward.reward_manager.module.path": "/work/rondo_verl.py",
        "reward.custom_reward_function.path": "/work/rondo_verl.py",
        "data.max_prompt_length": 64,
        "data.shuffle": False,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": 10,
        "trainer.checkpoint_callback_class": "rondo_verl.KeepPolicies",
        # Ray's workers get the folder of the metrics; the critic has micro-batches
        "+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR": "/work/tensorboard",
        "+critic.fsdp.use_dynamic_bsz": False,
    }
    assert expected.items() <= options.items()
    seeds = [value for name, value in options.items() if name.endswith("seed")]
    assert seeds == [7] * 6


def test_a_job_with_a_checkpoint_continues_from_it(tmp_path):
    job = job_of(settings("verl"), tmp_path)
    assert job.options()["trainer.resume_mode"] == "disable"
    job.states.mkdir()
    for text, update in (("", None), ("10", 10)):  # empty: it is being written
        (job.states / "latest_checkpointed_iteration.txt").write_text(text)
        options = job.options()
        folder = str(job.states / f"global_step_{update}") if update else None
        assert options.get("trainer.resume_from_path") == folder
        assert options["trainer.resume_mode"] == ("resume_path" if update else "disable")


@pytest.fixture
def written(tmp_path, tiny_folder) -> VerlJob:
    """A job whose inputs are written, of a model with two end tokens."""
    ppo = {"batch_size": 16, "mini_batch_size": 16, "total_episodes": 32, "score_clip": 2.0}
    penalties = {"missing_eos_penalty": 0.5, "length_penalty": 0.125, "free_length": 3}
    job = job_of(settings("verl", **ppo | penalties), tmp_path / "job", tmp_path)
    job.sft.mkdir()
    GenerationConfig(eos_token_id=[9, 2]).save_pretrained(job.sft)
    save_reward_model(job.reward, tiny_folder)
    episodes = [({"id": word, "prompt": word}, [ord(x) for x in word]) for word in ("cat", "the")]
    assert job.write_inputs(episodes, Letters()) == 1
    return job


def test_prompts_are_messages_in_the_order_of_the_updates(written):
    rows = Dataset.from_parquet(str(written.prompts)).to_list()
    assert len(rows) == 32 and (written.critic_start / "model.safetensors").exists()
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


def test_a_job_that_continues_leaves_the_last_checkpoint_and_all_policies(written):
    """verl would keep those of earlier jobs for ever."""
    for update in (2, 4, 6):
        policy = written.states / f"global_step_{update}/actor/huggingface"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text(str(update))
    (written.states / "latest_checkpointed_iteration.txt").write_text("4")
    written.write_prompts([{"id": "1", "prompt": "cat"}], Letters())
    assert [path.name for path in written.states.glob("global_step_*")] == ["global_step_4"]
    assert [path.name for path in written.kept.iterdir()] == ["global_step_2"]
    policies = written.policies(0, ended=False)
    assert {n: (path / "config.json").read_text() for n, path in policies.items()} == {
        2: "2",
        4: "4",
    }
    assert policies[4].is_relative_to(written.states)


def test_metrics_have_our_names(tmp_path):
    job = job_of(settings("verl"), tmp_path)
    writer = SummaryWriter(log_dir=str(job.events))
    values = {"actor/pg_loss": 0.5, "actor/reward_kl_penalty": 0.25, "critic/score/mean": 2.0}
    for step in (1, 2):
        for tag, value in values.items() | {("timing_s/gen", 0.125)}:
            writer.add_scalar(tag, value, step)
    writer.close()
    expected = {"policy_loss": 0.5, "kl_per_token": 0.25, "score_mean": 2.0}
    assert EngineMetrics(job).read() == [{"step": step} | expected for step in (1, 2)]


def test_episodes_that_verl_has_left_out_are_counted(tmp_path):
    job = job_of(settings("verl"), tmp_path)
    assert job.failed_episodes() == 0
    job.log.write_text("(AgentLoopWorkerTQ pid=7) Error in _run_prompt for uid=a1\nstep: 3\n" * 2)
    assert job.failed_episodes() == 2


@pytest.fixture
def plugin(written, monkeypatch) -> ModuleType:
    """rondo_verl.py as verl loads it, with stand-ins of verl's base classes."""

    class RewardManagerBase:
        def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
            pass

    class CheckpointCallback:
        pass

    names = {
        "verl.experimental.reward_loop.reward_manager.base": {
            "RewardManagerBase": RewardManagerBase
        },
        "verl.trainer.ppo.checkpoint_callback": {"CheckpointCallback": object},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("rondo_verl", written.folder / written.plugin)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RESPONSES = [[5, 6, 2], [5, 9], [5, 6], [5, 6, 7, 8, 4, 2], [5, 6, 7, 8, 4], [2]]


def test_rewards_are_shaped_as_those_of_rondos_own_ppo(plugin):
    ends, raw = EndTokens(2, (9,)), [1.0, -40.0, 40.0, 3.0, 2.5, 1.5]
    scores = shape_scores(
        (torch.tensor(raw) - 1.5) / 2.0,
        torch.tensor([ends.end(response) for response in RESPONSES]),
        torch.tensor([len(response) for response in RESPONSES]),
        clip=2.0,
        missing_eos_penalty=0.5,
        length_penalty=0.125,
        free_length=3,
    )
    made = [plugin.shaped(*pair) for pair in zip(raw, RESPONSES, strict=True)]
    assert made == pytest.approx(scores.tolist())
    for response in RESPONSES:
        assert plugin.closed(response) == ends.close(response)


def test_the_reward_model_reads_the_sampled_tokens_without_padding(plugin, monkeypatch):
    manager = plugin.RondoReward(None, None, None, reward_router_address="node:1")
    assert manager.url == "http://node:1/classify"
    sent: list[list[int]] = []

    async def score(_: object, tokens: list[int]) -> float:
        sent.append(tokens)
        return 1.0

    monkeypatch.setattr(plugin.RondoReward, "raw_score", score)
    batch = {
        "prompts": torch.tensor([7, 8, 0, 0]),
        "responses": torch.tensor([5, 6, 0]),
        "attention_mask": torch.tensor([1, 1, 0, 0, 1, 1, 0]),
    }
    reward = asyncio.run(manager.run_single([SimpleNamespace(batch=batch)]))
    assert sent == [[7, 8, 5, 6, 2]]
    assert reward == {"reward_score": (1.0 - 1.5) / 2 - 0.5, "reward_extra_info": {}}


def test_a_reward_model_that_does_not_answer_is_an_error(plugin, monkeypatch):
    monkeypatch.setattr(plugin, "TRIES", 2)
    manager = plugin.RondoReward(None, None, None, reward_router_address="127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:9/classify has no score .* Connect"):
        asyncio.run(manager.raw_score([1, 2]))
    with pytest.raises(RuntimeError, match="rewards are made by RondoReward"):
        plugin.compute_score("rondo", "text", "", {})


def test_a_reward_model_that_fails_once_is_asked_again(plugin, monkeypatch):
    """verl's router in front of vLLM answers 500 whatever the failure is."""
    answers = [(500, b"busy"), (200, json.dumps({"data": [{"probs": [0.25]}]}).encode())]
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            status, content = answers[len(statuses)]
            statuses.append(status)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(content)

    async def at_once(_: float) -> None:
        return None

    monkeypatch.setattr(plugin.asyncio, "sleep", at_once)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        manager = plugin.RondoReward(None, None, None, reward_router_address=address)
        assert asyncio.run(manager.raw_score([1, 2])) == 0.25
        answers[:], statuses[:] = [(500, b"too long")] * 9, []
        with pytest.raises(RuntimeError, match="500: too long"):
            asyncio.run(manager.raw_score([1, 2]))
        assert statuses == [500] * plugin.TRIES
        server.shutdown()


def test_policies_are_kept_when_verl_deletes_its_checkpoints(plugin, written):
    def save(update: int, tracked: bool = True) -> None:
        policy = written.states / f"global_step_{update}/actor/huggingface"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text(str(update))
        if tracked:
            (written.states / "latest_checkpointed_iteration.txt").write_text(str(update))

    def contents() -> dict[int, str]:
        policies = written.policies(0, ended=False)
        return {n: (path / "config.json").read_text() for n, path in sorted(policies.items())}

    callback = plugin.KeepPolicies()
    for update in (2, 4):  # verl is killed after it has written 2, before the call
        save(update)
    assert contents() == {2: "2", 4: "4"}
    callback.on_save(
        trainer=None, global_step=4, checkpoint_dir=str(written.states / "global_step_4")
    )
    for update in (2, 4):
        path = written.states / f"global_step_{update}/actor/huggingface/config.json"
        kept = written.folder / f"policies/global_step_{update}/config.json"
        assert os.path.samefile(path, kept)
        path.unlink()
        path.parent.rmdir()
    save(6, tracked=False)  # in the making
    assert contents() == {2: "2", 4: "4"}
    shutil.rmtree(written.folder / "policies/global_step_2")  # verl has left its folder, empty
    assert contents() == {4: "4"}
