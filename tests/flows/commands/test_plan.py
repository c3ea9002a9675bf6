"""`rondo plan`: its answer, and that the command which it recommends is one."""

import argparse
import shlex

import pytest

from flows.cli import exit_code
from flows.commands.plan import stage_bytes
from flows.core.config import resolve
from flows.execution.cluster_plan import parse_cluster
from flows.execution.model_shape import NAMED_SIZES
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm, Engine, KlControl, PpoParams
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def project(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(capsys, *arguments: str) -> str:
    assert exit_code(["plan", *arguments]) == 0
    return capsys.readouterr().out


def commands(output: str) -> list[Params]:
    """The params of the commands in the output."""
    parsed = argparse.ArgumentParser()
    parsed.add_argument("--preset", required=True)
    parsed.add_argument("--set", action="append")
    lines = [line for line in output.splitlines() if "rondo run " in line]
    words = [shlex.split(line.partition("rondo run ")[2]) for line in lines]
    options = [parsed.parse_args(each) for each in words]
    return [resolve(each.preset, None, each.set) for each in options]


@pytest.mark.parametrize("gpus", ["8x80", "2x8x80", "3x8x80", "32x8x80"])
def test_the_recommended_command_is_accepted(capsys, gpus):
    output = plan(capsys, "--model", "7b", "--gpus", gpus, "--set", "seed=5")
    params = commands(output)[-1]
    assert params.ppo.engine is Engine.openrlhf
    nodes = int(gpus.split("x")[0]) if gpus.count("x") == 2 else 1
    assert (params.launcher.nodes, params.launcher.gpus_per_node) == (nodes, 8)
    assert params.ppo.mini_batch_size % (nodes * 8) == 0
    assert params.seed == 5 and params.prepare.max_prompt_tokens == 1024


def test_a_small_model_needs_no_engine(capsys):
    output = plan(capsys, "--model", "0.5b", "--gpus", "1x80")
    assert "  recommended: rondo run --preset openrlhf " in output
    assert "does not fit" not in output
    assert "hours on A800" in output
    own, engine = commands(output)
    default = PpoParams()
    assert (own.ppo.engine, own.ppo.micro_batch_size) == (Engine.local, 1)
    assert own.ppo.gradient_checkpointing and own.ppo.response_length == 1024
    assert (own.ppo.lora.r, own.ppo.critic_lora.r) == (default.lora.r, default.critic_lora.r)
    assert own.ppo.learning_rate == default.learning_rate  # the preset's is for all weights
    assert own.ppo.critic_learning_rate == default.critic_learning_rate
    assert (engine.ppo.engine, engine.ppo.lora.r) == (Engine.openrlhf, 0)
    assert (engine.ppo.learning_rate, engine.ppo.critic_learning_rate) == (5e-7, 9e-6)


def test_settings_for_adapters_become_those_of_an_engine(capsys):
    """The default's reference, KL controller, penalties and rates are none that OpenRLHF has."""
    given = ["--set", "ppo.learning_rate=1e-6", "--set", "algorithm=rloo", "--set", "seed=7"]
    own, engine = commands(
        plan(capsys, "--model", "0.5b", "--gpus", "2x80", "--preset", "default", *given)
    )
    assert (own.algorithm, own.seed, own.ppo.learning_rate) == (Algorithm.ppo, 7, 1e-6)
    assert own.ppo.kl_control is PpoParams().kl_control and own.launcher.ray_address is None
    assert (engine.algorithm, engine.seed, engine.ppo.learning_rate) == (Algorithm.ppo, 7, 1e-6)
    assert engine.ppo.critic_learning_rate == 9e-6
    assert engine.ppo.kl_control is KlControl.fixed
    assert engine.prepare == own.prepare


def test_a_local_model_and_options_of_the_engine_stay(capsys, tiny_lm, tmp_path):
    model = str(tmp_path)
    tiny_lm().save_pretrained(model)
    options = "ppo.engine_options={ds.zero_stage: 2}"
    address = "launcher.ray_address=http://ray:8265"
    own, engine = commands(
        plan(capsys, "--model", model, "--gpus", "1x80", "--set", options, "--set", address)
    )
    assert own.assets.model == engine.assets.model == model
    assert own.ppo.engine_options == {}
    for named, hint in ((model, False), ("0.5b", True)):
        assert ("add your model" in plan(capsys, "--model", named, "--gpus", "1x80")) is hint
    assert engine.ppo.engine_options == {"ds.zero_stage": 2, "vllm.tensor_parallel_size": 1}
    assert engine.launcher.ray_address == "http://ray:8265"


def test_settings_of_verl_become_those_of_openrlhf_whose_memory_is_known(capsys):
    options = "ppo.engine_options={trainer.critic_warmup: 2}"
    _, engine = commands(
        plan(
            capsys,
            *("--model", "0.5b", "--gpus", "1x80"),
            *("--set", "ppo.engine=verl", "--set", options),
        )
    )
    assert engine.ppo.engine is Engine.openrlhf
    assert engine.ppo.engine_options == {"vllm.tensor_parallel_size": 1}


def test_settings_that_no_engine_can_honour_are_named(capsys):
    no_kl = ["--preset", "default", "--set", "ppo.kl_coef=0", "--set", "ppo.kl_control=fixed"]
    output = plan(capsys, "--model", "0.5b", "--gpus", "1x80", *no_kl)
    assert "fits, but not with these settings: " in output and "ppo.kl_coef above 0" in output
    assert len(commands(output)) == 1


def test_the_memory_is_that_of_the_commands(capsys):
    output = plan(capsys, "--model", "3b", "--gpus", "8x80", "--preset", "default")
    lines = [line for line in output.splitlines() if "; GB: " in line]
    for line, params in zip(lines, commands(output), strict=True):
        sizes = stage_bytes(params, NAMED_SIZES["3b"], parse_cluster("8x80"))
        assert f", ppo {sizes['ppo'] / 1e9:.0f}, " in line


def test_too_few_gpus_are_named_with_the_number_that_suffices(capsys):
    output = plan(capsys, "--model", "70b", "--gpus", "8x80")
    assert "OpenRLHF with all weights does not fit on these GPUs; it takes 3 x 8 of them" in output
    assert "launcher.nodes" not in output


def test_stages_that_do_not_fit_on_one_gpu_are_named(capsys):
    """Evaluation has seven models of 16 GB, and their caches."""
    output = plan(capsys, "--model", "8b", "--gpus", "8x80")
    own, beside = [line for line in output.splitlines() if line.startswith("  does not fit: ")]
    assert "evaluate" in own
    assert "evaluate" in beside
    assert "sft" not in own
    assert "recommended" not in output


def test_lengths_of_the_settings_count(capsys):
    long = plan(capsys, "--model", "7b", "--gpus", "8x80")
    short = plan(capsys, "--model", "7b", "--gpus", "8x80", "--set", "ppo.response_length=128")
    assert "1024 + 1024 tokens" in long
    assert "1024 + 128 tokens" in short


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "7b", "--gpus", "8"], "--gpus 8: expected GPUs x GB"),
        (["--model", "no/such-model", "--gpus", "8x80"], "--model no/such-model: no folder, no"),
        (["--model", "7b", "--gpus", "8x80", "--set", "ppo.kl=1"], "ppo.kl"),
    ],
)
def test_what_is_unknown_is_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert exit_code(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
