"""The stages in two processes have the results of one; for PPO: ppo/test_processes.py."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from flows.execution import fork_server
from stages.assets.inputs import main as inputs
from stages.lib.core.params import Params, check_params, load_params
from stages.ppo.common.resume import Resume
from tests.paths import ROOT
from tests.stages import shared_program
from tests.stages.ppo.alternatives.kill import SECTIONS, run_killed
from tests.stages.ppo.stage_process import double_prompts
from tests.stages.shared_program import OTHER_STAGES, alternative

# a judge that notes which process asks it
JUDGE = """import os


def judge(prompts, responses):
    with open("judge.pids", "a") as stream:
        print(os.getpid(), file=stream)
    return [len(set(response)) / 9 for response in responses]
"""
# runs when a Python process starts
NOTE_START = """import sys

with open("starts", "a") as stream:
    print(*sys.orig_argv, file=stream)
"""
JUDGES = ["functions:judge", "lexicon", "fluency"]


def write_params(params: Params, processes: int) -> None:
    values = params.model_dump(mode="json") | {"launcher": {"processes": processes}}
    values["evaluate"]["judges"] = JUDGES
    # 18 rows in a batch of 17 and one of 1, of which one process gets none; 84 pairs by fives
    sft = {"per_device_train_batch_size": 17, "gradient_accumulation_steps": 2}
    values["sft"] |= sft | {"num_train_epochs": 2}
    values["reward"]["per_device_train_batch_size"] = 5
    checked = check_params(values, "test")
    Path("params.yaml").write_text(yaml.safe_dump(checked.model_dump(mode="json")))
    inputs(checked, "r0")


def folders() -> list[Path]:
    stages = [Path("rounds/r0", stage) for stage in OTHER_STAGES]
    return [*stages, *(Path("rounds", algorithm) for algorithm in SECTIONS)]


def results() -> dict[str, Any]:
    """The contents of the stages' files, without hashes of weights."""
    contents: dict[str, Any] = {}
    for folder in folders():
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".json":
                contents[str(path)] = json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                contents[str(path)] = [json.loads(line) for line in path.read_text().splitlines()]
        for name in ("inputs", "weights", "processes"):
            contents[f"{folder}/manifest.json"].pop(name, None)
    return contents


def weights() -> dict[str, dict[str, Tensor]]:
    return {
        str(path): load_file(path)
        for folder in folders()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def approximately(value: Any) -> Any:
    """Up to the rounding of float32, which depends on the rows of a batch."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    # files have four digits; the last one of a KL of 0.0437 differs by 1e-5 and an error of floats
    return pytest.approx(value, rel=1e-4, abs=1.01e-5) if isinstance(value, float) else value


def test_two_processes_have_the_results_of_one(make_round, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes need two GPUs, if there are any
    monkeypatch.syspath_prepend(Path.cwd())
    params = make_round("r0", 1.0)
    Path("functions.py").write_text(JUDGE)
    shutil.move("rounds/r0/ppo", "ppo")
    double_prompts()
    shutil.copytree("rounds/r0", "before")
    write_params(params, 1)
    shared_program.main()
    one, trained = results(), weights()
    assert len({*Path("judge.pids").read_text().splitlines()}) == 1

    shutil.rmtree(".rondo")
    shutil.rmtree("rounds")
    shutil.copytree("before", "rounds/r0")
    write_params(params, 2)
    # killed before the state of its third update is saved; two processes resume it
    run_killed(alternative(load_params(), "dpo"), (3, Resume, "save"), monkeypatch)
    Path("judge.pids").unlink()
    Path("sitecustomize.py").write_text(NOTE_START)
    run = subprocess.run(
        [fork_server.python(), "-m", "tests.stages.shared_program"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path.cwd()}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert run.returncode == 0, run.stderr
    assert results() == approximately(one)
    # a hundredth of a step of the alternatives, whose rate is 0.01
    torch.testing.assert_close(weights(), trained, rtol=0, atol=1e-4)
    assert len({*Path("judge.pids").read_text().splitlines()}) == 1, "one of them asks the judge"
    assert run.stdout.count("against SFT") == 1, "one of them prints"
    assert run.stdout.count("resumes from here") == 1
    # by as many processes, whose sums are rounded alike; the one that starts them is forked
    assert "in a fresh process, texts and numbers of all" in run.stdout
    assert Path("starts").read_text().count("-m stages.evaluate.reproduce r0") == 2
