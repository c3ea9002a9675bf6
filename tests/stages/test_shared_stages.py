"""The stages in two processes have the results of one; for PPO: ppo/test_processes.py."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from flows.execution import fork_server
from stages.assets.inputs import main as inputs
from stages.lib.core.params import SHARED, Params, check_params
from tests.paths import ROOT
from tests.stages import shared_program

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


def results() -> dict[str, Any]:
    """The contents of the stages' files, without hashes of weights."""
    contents: dict[str, Any] = {}
    for stage in SHARED:
        for path in sorted(Path("rounds/r0", stage).rglob("*")):
            if path.suffix == ".json":
                contents[str(path)] = json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                contents[str(path)] = [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                weights = load_file(path).items()
                contents[str(path)] = {name: weight.float().tolist() for name, weight in weights}
        for name in ("inputs", "weights"):
            contents[f"rounds/r0/{stage}/manifest.json"].pop(name, None)
    return contents


def approximately(value: Any) -> Any:
    """Up to the rounding of float32, which depends on the rows of a batch."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value


def test_two_processes_have_the_results_of_one(make_round, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes need two GPUs, if there are any
    monkeypatch.syspath_prepend(Path.cwd())
    params = make_round("r0", 1.0)
    Path("functions.py").write_text(JUDGE)
    write_params(params, 1)
    shared_program.main()
    one = results()
    assert len({*Path("judge.pids").read_text().splitlines()}) == 1

    write_params(params, 2)
    Path("judge.pids").unlink()
    Path("sitecustomize.py").write_text(NOTE_START)
    run = subprocess.run(
        [fork_server.python(), "-m", "tests.stages.shared_program"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path.cwd()}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert results() == approximately(one)
    assert len({*Path("judge.pids").read_text().splitlines()}) == 1, "one of them asks the judge"
    assert run.stdout.count("against SFT") == 1, "one of them prints"
    # by as many processes, whose sums are rounded alike; the one that starts them is forked
    assert "in a fresh process, texts and numbers of all" in run.stdout
    assert Path("starts").read_text().count("-m stages.evaluate.reproduce r0") == 2
