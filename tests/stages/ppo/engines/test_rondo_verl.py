"""What verl loads from the job's folder, with stand-ins of verl's base classes."""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stages.lib.lm.end_tokens import EndTokens
from stages.ppo.common.rewards import shape_scores
from tests.stages.ppo.engines.stand_in.install import install, recorded_versions


@pytest.fixture
def plugin(written, tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """rondo_verl.py as verl loads it, with stand-ins of verl's base classes."""
    install(tmp_path / "engines", recorded_versions())
    monkeypatch.syspath_prepend(str(tmp_path / "engines"))
    spec = importlib.util.spec_from_file_location("rondo_verl", written.plugin)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]


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
