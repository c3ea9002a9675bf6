"""What a run with an engine checks, needs and prints before it starts."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.commands.dry_run import engine_commands
from flows.core.config import overlay
from flows.execution import needs
from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.files import WORK
from stages.lib.core.params import Params, check_params
from stages.lib.core.ray import job
from stages.ppo.engines import make_job
from stages.ppo.engines.job import EngineMetrics
from tests import engine_settings
from tests.engine_settings import NEEDED
from tests.ray_stand_in import RayStandIn
from tests.servers import NOWHERE
from tests.stages.ppo.engines.jobs import install

WAITING = {"sft@r0", "ppo@r0", "ppo@r1"}
ALL_WEIGHTS = {"lora": {"r": 0}, "critic_lora": {"r": 0}, "micro_batch_size": 4}


def with_engine(address: str) -> Params:
    return check_params({"ppo": ALL_WEIGHTS | NEEDED, "launcher": {"ray_address": address}}, "test")


@pytest.fixture
def ray() -> Iterator[RayStandIn]:
    server = RayStandIn({})
    yield server
    server.close()


@pytest.fixture
def openrlhf(ray, tmp_path, monkeypatch) -> None:
    """Its command is on the cluster."""
    install(tmp_path / "engine", openrlhf="0.11.2")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ray.environment |= {"PYTHONPATH": str(tmp_path / "engine"), "PATH": path}
    monkeypatch.setattr(job, "POLL_SECONDS", 0.1)


def test_the_cluster_and_the_engine_are_asked_before_the_run(ray, openrlhf, monkeypatch):
    monkeypatch.setattr(http_session, "BACKOFF_SECONDS", 0.0)
    lines: list[str] = []
    needs.check(with_engine(ray.address), sorted(WAITING), WAITING, lines.append)
    assert f"on Ray 2.55.0 at {ray.address}: ppo by openrlhf" in lines
    assert "OpenRLHF 0.11.2 there accepts its options" in lines
    assert not list(WORK.glob("check-*"))
    with pytest.raises(Unreachable, match=r"no Ray dashboard answers there"):
        needs.check(with_engine(NOWHERE), sorted(WAITING), WAITING, lines.append)
    needs.check(with_engine(NOWHERE), sorted(WAITING), {"sft@r0"}, lines.append)


def test_an_option_that_the_engine_refuses_ends_a_run_before_its_first_stage(ray, openrlhf):
    params = with_engine(ray.address)
    params.ppo.engine_options = {"ds.zero_stage": "two"}
    with pytest.raises(BadInput, match=r"refuses its options: argument --ds\.zero_stage: invalid"):
        needs.check(params, sorted(WAITING), WAITING, print)


def test_a_cluster_that_has_not_the_engine_is_refused(ray, openrlhf, tmp_path):
    ray.environment["PYTHONPATH"] = ""
    with pytest.raises(BadInput, match=r"python3 on the Ray cluster has no package openrlhf"):
        needs.check(with_engine(ray.address), sorted(WAITING), WAITING, print)
    broken = tmp_path / "bin/python3"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no libraries; exit 1\n")
    broken.chmod(0o755)
    ray.environment["PATH"] = f"{broken.parent}:/usr/bin:/bin"
    with pytest.raises(RondoError, match=r"no libraries\nNext: does the cluster see"):
        needs.check(with_engine(ray.address), sorted(WAITING), WAITING, print)


def test_stages_on_a_cluster_need_it_and_no_memory_here(ray, monkeypatch):
    monkeypatch.setattr(http_session, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(needs, "ram_bytes", lambda: 1000)
    launcher = {"type": "ray", "ray_address": ray.address}
    stages = {"sft@r0", "annotate@r0", "reward@r0"}
    lines: list[str] = []

    def check(launcher: dict[str, str], waiting: set[str]) -> None:
        params = check_params({"launcher": launcher}, "test")
        needs.check(params, sorted(waiting), waiting, lines.append)

    check(launcher, stages)
    assert f"on Ray 2.55.0 at {ray.address}: sft, reward" in lines
    assert not any(line.startswith("GB of memory") for line in lines)
    with pytest.raises(Unreachable, match=r"no Ray dashboard answers there"):
        check(launcher | {"ray_address": NOWHERE}, stages)
    check(launcher | {"ray_address": NOWHERE}, {"annotate@r0"})
    with pytest.raises(RondoError, match=r"reward needs .* and this machine has 1\.0 kB"):
        check({}, stages)


def test_a_missing_package_is_noticed_before_the_run(ray, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RondoError, match=r"needs tensorboard: pip install -e '.\[engines\]'"):
        needs.check(with_engine(ray.address), sorted(WAITING), WAITING, print)
    with pytest.raises(RondoError, match="needs tensorboard"):
        EngineMetrics(make_job(with_engine(ray.address), "r0", Path("run")))


def test_a_dry_run_has_the_command_of_each_round():
    commands = engine_commands(with_engine(NOWHERE), WAITING)
    assert [line.split(":")[0] for line in commands] == ["ppo@r0", "ppo@r1"]
    words = shlex.split(commands[1])
    assert words[1:4] == ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
    model = words[words.index("--actor.model_name_or_path") + 1]
    assert model.endswith("rounds/r1/sft/model")
    assert words[words.index("--reward.model_name_or_path") + 1].endswith("rounds/r1/reward/model")
    assert engine_commands(Params(), WAITING) == []


def test_a_dry_run_has_the_command_of_nemo_rl():
    """Also before the models are there, whose numbers the command does not have."""
    ppo = ALL_WEIGHTS | engine_settings.NEMO_RL
    launcher = {"ray_address": NOWHERE, "gpus_per_node": 2}
    [line] = engine_commands(check_params({"ppo": ppo, "launcher": launcher}, "test"), {"ppo@r1"})
    address, *words = shlex.split(line)
    assert (address, words[0], Path(words[1]).name) == ("ppo@r1:", "python3", "rondo_nemo_rl.py")
    assert "loss_fn.use_kl_in_reward=true" in words


def test_a_dry_run_has_the_command_of_verl():
    ppo = ALL_WEIGHTS | engine_settings.VERL
    params = check_params({"ppo": ppo, "launcher": {"ray_address": NOWHERE}}, "test")
    [command] = engine_commands(params, {"ppo@r1"})
    address, *words = shlex.split(command)
    assert (address, words[:3]) == ("ppo@r1:", ["python3", "-m", "verl.trainer.main_ppo"])
    settings = dict(word.split("=", 1) for word in words[3:])
    model = Path("rounds/r1/reward/model").resolve()
    assert settings["reward.reward_model.model_path"] == f"'{model}'"
    assert settings["critic.model.path"].endswith("r1/ppo/RUN/engine/critic'")
    assert settings["actor_rollout_ref.model.path"].endswith("rounds/r1/sft/model'")


def test_options_of_the_engine_are_replaced_as_a_whole():
    """A merge would keep an option that the user has removed."""
    base = {"ppo": {"engine_options": {"ds.zero_stage": 2, "ds.zpg": 1}}}
    top = {"ppo": {"engine_options": {"ds.zpg": 4}}}
    assert overlay(base, top) == top
