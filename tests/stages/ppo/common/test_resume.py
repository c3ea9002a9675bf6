"""The resume state, and what identifies a run."""

import hashlib
import json
import os
import random
from pathlib import Path

import numpy
import pytest
import torch

from stages.lib.core.params.policy import Algorithm
from stages.ppo.common.resume import Resume, random_state, run_identity, set_random_state
from tests.paths import ROOT


def test_params_inputs_code_and_judge_identify_a_run(make_round):
    params = make_round("r0", 1.0)
    Path("mine.py").write_text("def score(prompts, responses):\n    return [0.0] * len(prompts)\n")
    params.evaluate.judges = ["mine:score"]
    prompts = Path("rounds/r0/prepare/data/prompts_train.jsonl")
    original = run_identity(params, [prompts])
    assert run_identity(params, [prompts]) == original
    code = {path: digest for path, digest in original["files"].items() if path.endswith(".py")}
    for name in ("stages/ppo/trainer/functional.py", "stages/lib/lm/generation.py"):
        assert code[str(ROOT / name)] == hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    # nor may a word in code that PPO does not run throw its state away
    unused = ("stages/gate/", "stages/replay/", "stages/lib/dedup/", "stages/ppo/engines/")
    assert not [
        path for path in code if path.startswith(tuple(f"{ROOT}/{name}" for name in unused))
    ]
    warmer = params.ppo.model_copy(update={"temperature": 0.9})
    others = [
        run_identity(params.model_copy(update={"ppo": warmer}), [prompts]),
        run_identity(params.model_copy(update={"seed": 1}), [prompts]),
    ]
    with Path("mine.py").open("a") as stream:
        stream.write("# another judge\n")
    others.append(run_identity(params, [prompts]))
    with prompts.open("a") as stream:
        stream.write('{"id": "new", "prompt": "The queue"}\n')
    others.append(run_identity(params, [prompts]))
    dpo = params.model_copy(update={"algorithm": Algorithm.dpo})
    beta = params.dpo.model_copy(update={"beta": 0.2})
    others.append(run_identity(dpo, [prompts]))
    others.append(run_identity(dpo.model_copy(update={"dpo": beta}), [prompts]))
    identities = [json.dumps(identity, sort_keys=True) for identity in (original, *others)]
    assert len(set(identities)) == 7
    # settings of an algorithm that does not run change nothing
    assert run_identity(params.model_copy(update={"dpo": beta}), [prompts]) == others[3]


def test_a_state_of_another_run_is_ignored(tmp_path):
    Resume(tmp_path, {"seed": 0}).save({"updates": 3})
    assert Resume(tmp_path, {"seed": 0}).load()["updates"] == 3
    assert Resume(tmp_path, {"seed": 1}).load() is None
    Resume(tmp_path, {"seed": 0}).clear()
    assert Resume(tmp_path, {"seed": 0}).load() is None


def test_random_state_of_every_generator():
    def draw():
        return random.gauss(0, 1), float(numpy.random.normal()), torch.rand(1).item()

    draw()  # after an odd number of normal draws the generators store the next one
    state = random_state()
    first = draw()
    set_random_state(state)
    assert draw() == first


def test_a_kill_while_saving_leaves_the_state_before(tmp_path, monkeypatch):
    resume = Resume(tmp_path, {})
    resume.save({"updates": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        resume.save({"updates": 2})
    assert resume.load()["updates"] == 1
