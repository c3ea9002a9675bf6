"""`rondo plan`: its answer, and that the command which it prints is one."""

import argparse
import json
import shlex

import pytest

from flows.cli import exit_code
from flows.commands.plan import parse_cluster
from flows.core.config import resolve
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Engine, PpoParams
from tests.paths import ROOT
from tests.terminal import printed_in_terminal


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
    parsed.add_argument("--set", action="append", default=[])
    lines = [line for line in output.splitlines() if "rondo run " in line]
    words = [shlex.split(line.partition("rondo run ")[2]) for line in lines]
    options = [parsed.parse_args(each) for each in words]
    return [resolve(each.preset, None, each.set) for each in options]


def all_of(output: str, stage: str) -> list[float]:
    """The last column of a stage's row in each table."""
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(stage)]
    return [float(row[-1]) for row in rows if row[-1].replace(".", "").isdigit()]


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "gigabytes"),
    [("8x80", 1, 8, 80), ("2x8x80", 2, 8, 80), ("1x23.7", 1, 1, 23.7), ("4X8X141", 4, 8, 141)],
)
def test_a_cluster_is_parsed(text, nodes, gpus, gigabytes):
    assert parse_cluster(text) == pytest.approx((nodes, gpus, gigabytes * 1e9))


def test_the_plan_as_json(capsys):
    shown = plan(capsys, "--model", "8b", "--gpus", "8x80")
    values = json.loads(plan(capsys, "--model", "8b", "--gpus", "8x80", "--json"))
    assert values["weights"] == pytest.approx(8.03e9, rel=1e-3)
    engine, own = values["proposals"].values()
    for proposed in (engine, own):
        sizes = proposed["gigabytes"]["evaluate"]
        assert sizes["all"] == pytest.approx(sum(sizes.values()) - sizes["all"])
        assert f"does not fit: {', '.join(proposed['too_large'])}" in shown
        assert proposed["command"] in shown
    assert all_of(shown, "sft")[0] == pytest.approx(engine["gigabytes"]["sft"]["all"], abs=0.05)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_plan_fits_the_terminal(columns: int) -> None:
    """The command, which is copied, stays one line."""
    lines = printed_in_terminal(["plan", "--model", "8b", "--gpus", "8x80"], columns)
    texts = [line for line in lines if "rondo run " not in line]
    assert len(texts) < len(lines) and max(map(len, texts)) <= columns
    assert any("stage" in line and "weights" in line and "all" in line for line in texts)


@pytest.mark.parametrize("text", ["", "8", "x80", "8x", "0x80", "8x0", "2.5x80", "1x2x3x4"])
def test_what_is_no_cluster_is_refused(text):
    with pytest.raises(BadInput, match=r"expected GPUs x GB of one, e\.g\. 8x80"):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("gpus", "batches"),
    [("8x80", (1024, 128, 8)), ("3x8x80", (1008, 144, 2)), ("32x8x80", (1024, 256, 1))],
)
def test_an_engine_has_whole_optimizer_steps_with_episodes_for_every_gpu(capsys, gpus, batches):
    """On 24 GPUs, 144 episodes are 6 per GPU, by 2."""
    params = commands(plan(capsys, "--model", "7b", "--gpus", gpus, "--set", "seed=5"))[0]
    ppo, nodes = params.ppo, int(gpus.split("x")[0]) if gpus.count("x") == 2 else 1
    assert ppo.engine is Engine.openrlhf and params.seed == 5
    assert (params.launcher.nodes, params.launcher.gpus_per_node) == (nodes, 8)
    assert (ppo.batch_size, ppo.mini_batch_size, ppo.micro_batch_size) == batches


def test_a_small_model_needs_no_engine(capsys):
    output = plan(capsys, "--model", "0.5b", "--gpus", "1x80")
    assert "does not fit" not in output
    engine, own = commands(output)
    default = PpoParams()
    assert (engine.ppo.engine, engine.ppo.lora.r) == (Engine.openrlhf, 0)
    assert (own.ppo.engine, own.ppo.micro_batch_size) == (Engine.local, 1)
    assert own.ppo.gradient_checkpointing and own.ppo.response_length == 1024
    assert (own.ppo.lora.r, own.ppo.critic_lora.r) == (default.lora.r, default.critic_lora.r)
    assert own.ppo.learning_rate == default.learning_rate  # the preset's is for all weights
    given = plan(capsys, "--model", "0.5b", "--gpus", "1x80", "--set", "ppo.learning_rate=1e-6")
    assert commands(given)[1].ppo.learning_rate == 1e-6


def test_settings_of_rondos_own_ppo_stay_as_they_are(capsys):
    output = plan(capsys, "--model", "3b", "--gpus", "1x80", "--preset", "default")
    as_set, saving = commands(output)
    assert as_set == resolve("default") and saving.ppo.micro_batch_size == 1
    assert "openrlhf" not in output


def test_a_local_model_and_options_of_the_engine_stay(capsys, tiny_lm, tmp_path):
    model = str(tmp_path)
    tiny_lm().save_pretrained(model)
    options = ["ppo.engine_options={ds.zero_stage: 2}", "launcher.ray_address=http://ray:8265"]
    settings = [word for option in options for word in ("--set", option)]
    engine, own = commands(plan(capsys, "--model", model, "--gpus", "1x80", *settings))
    assert own.assets.model == engine.assets.model == model
    assert own.ppo.engine_options == {}
    assert engine.ppo.engine_options == {"ds.zero_stage": 2, "vllm.tensor_parallel_size": 1}
    assert engine.launcher.ray_address == "http://ray:8265"


@pytest.mark.parametrize(("model", "gpus", "size"), [("7b", "8x40", 2), ("32b", "4x8x80", 4)])
def test_a_copy_in_vllm_has_as_many_gpus_as_leave_it_room(capsys, model, gpus, size):
    output = plan(capsys, "--model", model, "--gpus", gpus)
    assert commands(output)[0].ppo.engine_options == {"vllm.tensor_parallel_size": size}


# verl's docs, "Hardware Resource Needed for RL": the fewest GPUs with 80 GB on which all weights
# were trained (GRPO, with offload). Here a critic takes turns with the policy.
@pytest.mark.parametrize(
    ("model", "gpus", "published"), [("7b", "1x80", 2), ("14b", "2x80", 4), ("72b", "8x80", 32)]
)
def test_the_fewest_gpus_are_those_that_were_published_or_fewer(capsys, model, gpus, published):
    output = plan(capsys, "--model", model, "--gpus", gpus)
    fewest = int(output.partition("ppo by openrlhf takes ")[2].split()[0])
    assert published / 2 <= fewest <= published
    assert len(commands(output)) < 2


def test_stages_that_do_not_fit_on_one_gpu_are_named(capsys):
    """Evaluation has six or seven models of 16 GB, and a quarter of the GPU for its cache."""
    output = plan(capsys, "--model", "8b", "--gpus", "8x80")
    assert "  does not fit: evaluate, replay" in output and "  does not fit: evaluate\n" in output
    assert all_of(output, "evaluate") == pytest.approx([7 * 16.06 + 20, 6 * 16.06 + 20], abs=0.1)


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
