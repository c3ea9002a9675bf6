"""`rondo plan`: its answer, and that the command which it recommends is one."""

import shlex

import pytest

from flows.cli import exit_code
from flows.core.config import resolve
from stages.lib.core.params.policy import Engine
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def project(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(capsys, *arguments: str) -> str:
    assert exit_code(["plan", *arguments]) == 0
    return capsys.readouterr().out


def recommended(output: str) -> list[str]:
    """The `--set` values of the last command."""
    words = shlex.split([line for line in output.splitlines() if "rondo run" in line][-1])
    return [word for word in words if "=" in word]


@pytest.mark.parametrize("gpus", ["8x80", "2x8x80", "3x8x80", "32x8x80"])
def test_the_recommended_command_is_accepted(capsys, gpus):
    output = plan(capsys, "--model", "7b", "--gpus", gpus)
    settings = recommended(output)
    params = resolve("openrlhf", None, settings)
    assert params.ppo.engine is Engine.openrlhf
    nodes = int(gpus.split("x")[0]) if gpus.count("x") == 2 else 1
    assert (params.launcher.nodes, params.launcher.gpus_per_node) == (nodes, 8)


def test_a_small_model_needs_no_engine(capsys):
    output = plan(capsys, "--model", "0.5b", "--gpus", "1x80")
    assert "recommended: rondo run --set ppo.micro_batch_size=1" in output
    assert "does not fit" not in output
    assert "hours on A800" in output


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
