"""PPO in several processes does what it does in one, and all of them end together."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.assets.inputs import main as inputs
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from tests.stages.ppo.stage_process import (
    OUTPUTS,
    delete_outputs,
    outputs,
    run_to_the_end,
    start,
    wait_for_updates,
)
from tests.stages.shared_program import alternative

UPDATES = 4
# A judge, and a reward that fails for one prompt; both note which process has called them
FUNCTIONS = """import os


def note(name):
    with open(f"{name}.pids", "a") as stream:
        print(os.getpid(), file=stream)


def judge(prompts, responses):
    note("judge")
    return [len(set(response)) / 9 for response in responses]


def reward(prompts, responses):
    note("reward")
    return [
        None if prompt == "The walk" else len(response) / 9
        for prompt, response in zip(prompts, responses)
    ]
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are GPUs: several processes need several of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_params(
    params: Params, processes: int, cluster: str = "", shard: bool = False, **changes: object
) -> None:
    """Four updates of 6 episodes, each of two epochs of two mini-batches of 3; two processes have
    micro-batches of one and two episodes, one process has three. cluster: of Ray.
    """
    ppo = {"batch_size": 6, "mini_batch_size": 3, "micro_batch_size": 3, "num_ppo_epochs": 2}
    ppo |= {"total_episodes": 6 * UPDATES, "save_updates": 2, "learning_rate": 5e-3}
    ppo |= {
        "rewards": [{"name": "size", "function": "functions:reward"}],
        "max_failed_rewards": 0.5,
    }
    values = params.model_dump(mode="json")
    values["ppo"] |= ppo | {"on_danger": "warn", "resume_updates": 1} | changes
    values["launcher"] = {"processes": processes, "shard": shard}
    if cluster:
        values["launcher"] |= {"type": "ray", "ray_address": cluster}
    values["evaluate"]["judges"] = ["functions:judge"]
    Path("functions.py").write_text(FUNCTIONS)
    checked = check_params(values, "test")
    Path("params.yaml").write_text(yaml.safe_dump(checked.model_dump(mode="json")))
    inputs(checked, "r0")


def finish(weights: str = "adapter_model") -> dict[str, Any]:
    """Run to the end; what the run has computed. weights: name of the models' files."""
    for path in Path().glob("*.pids"):
        path.unlink()
    output = run_to_the_end()
    for path in Path().glob("*.pids"):
        assert len({*path.read_text().splitlines()}) == 1, "one process calls it"
    assert Path("judge.pids").exists()
    steps = [json.loads(line) for line in (OUTPUTS / "metrics.jsonl").read_text().splitlines()]
    return {
        "output": output,
        "steps": steps,
        "metrics": json.loads((OUTPUTS / "metrics.json").read_text()),
        "policy": load_file(OUTPUTS / f"policy/{weights}.safetensors"),
        "critic": load_file(OUTPUTS / f"critic/{weights}.safetensors"),
        "bytes": outputs(),
    }


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Sums of other parts are rounded otherwise, in float32 by 1e-7 of their size."""
    for step, expected_step in zip(actual["steps"], expected["steps"], strict=True):
        assert step == pytest.approx(expected_step, rel=1e-3, abs=1e-5)
    for model in ("policy", "critic"):
        torch.testing.assert_close(actual[model], expected[model], rtol=0, atol=1e-5)
    kept = ("policy_update", "stopped")
    assert [actual["metrics"][name] for name in kept] == [
        expected["metrics"][name] for name in kept
    ]
    scale = expected["metrics"]["policy_scale"]
    assert actual["metrics"]["policy_scale"] == pytest.approx(scale, rel=1e-3)


def delete_everything() -> None:
    delete_outputs()
    shutil.rmtree(".rondo", ignore_errors=True)


@contextmanager
def nothing_is_left(process: subprocess.Popen[str]) -> Iterator[list[psutil.Process]]:
    """The two processes of a stage; after the block, they end."""
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        assert process.poll() is None, process.communicate()[0]
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
        time.sleep(0.01)
    yield ranks
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive


def kill_one_of_two(updates: int) -> None:
    """Start the stage, and kill its second process after some updates: all end."""
    process = start()
    wait_for_updates(process, updates)
    with nothing_is_left(process) as ranks:
        ranks[1].kill()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1, output
    assert "process 2 of 2 was ended by SIGKILL, and the others with it" in output
    assert "Traceback" not in output


def test_two_processes_do_what_one_does_also_if_killed_and_resumed(small_round):
    """Each number of processes is killed, and resumed by both numbers."""
    write_params(small_round, 1)
    process = start()
    wait_for_updates(process, 2)
    process.kill()
    process.wait()
    delete_outputs()
    shutil.copytree(".rondo", "killed_one")
    one = finish()
    assert "resumes from here" in one["output"]

    delete_everything()
    write_params(small_round, 2)
    two = finish()
    assert_close(two, one)
    assert {0.0} < {step["reward_failed_share"] for step in two["steps"]}
    # one of them prints
    assert "[ppo@r0] 2 processes" in two["output"] and two["output"].count("distinct_2") == UPDATES
    assert json.loads((OUTPUTS / "manifest.json").read_text())["processes"] == 2

    delete_everything()
    shutil.copytree("killed_one", ".rondo")
    resumed = finish()
    assert "resumes from here" in resumed["output"]
    assert_close(resumed, one)

    delete_everything()
    kill_one_of_two(2)
    delete_outputs()
    shutil.copytree(".rondo", "killed_two")
    resumed = finish()
    assert "resumes from here" in resumed["output"]
    assert resumed["bytes"] == two["bytes"]

    delete_everything()
    shutil.copytree("killed_two", ".rondo")
    write_params(small_round, 1)
    resumed = finish()
    assert "resumes from here" in resumed["output"]
    assert_close(resumed, one)


def test_the_pass_that_serves_the_first_step_is_shared(small_round):
    """One micro-batch is all episodes of a process, and the mini-batch is the whole batch."""
    whole = {"mini_batch_size": 6, "micro_batch_size": 6, "rewards": []}
    write_params(small_round, 1, **whole)
    one = finish()
    delete_everything()
    write_params(small_round, 2, **whole)
    assert_close(finish(), one)


def test_a_trainer_of_trl_ends_and_resumes_in_two_processes(small_round):
    """DPO, whose batches the processes share out of Accelerate's sight."""
    dpo = alternative(small_round, "dpo")
    write_params(dpo, 2, rewards=[])
    run_to_the_end()
    undisturbed = outputs()
    assert json.loads(undisturbed["manifest.json"])["algorithm"] == "dpo"
    delete_everything()
    kill_one_of_two(2)  # the state after the first update is saved
    delete_outputs()
    assert "resumes from here" in run_to_the_end()
    assert outputs() == undisturbed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_one_that_started_them(small_round, number):
    write_params(small_round, 2, total_episodes=6 * 10_000)  # they would not end by themselves
    process = start()
    wait_for_updates(process, 1)
    with nothing_is_left(process):
        process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == -number, output


def test_all_processes_stop_if_one_meets_nan(small_round):
    """The reward model's state of the last prompt's last token is NaN, which is met by the process
    that gets this prompt.
    """
    prompts = read_jsonl(Path("rounds/r0/prepare/data/prompts_train.jsonl"), "")
    tokenizer = AutoTokenizer.from_pretrained("rounds/r0/sft/model")
    model = Path("rounds/r0/reward/model/model.safetensors")
    weights = load_file(model)
    weights["model.embed_tokens.weight"][tokenizer(prompts[-1]["prompt"]).input_ids[-1]] = torch.nan
    save_file(weights, model, {"format": "pt"})
    write_params(small_round, 2)
    process = start()
    with nothing_is_left(process):
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 1 and "raw_scores" in output and "not finite" in output, output
    assert output.count("the policy starts from") == 1  # no restart
