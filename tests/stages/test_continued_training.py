"""A later round continues from the models of the round before, or starts anew."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from stages.lib.core.params import Params, check_params
from stages.reward.__main__ import main as reward
from stages.sft.__main__ import main as sft
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("round_", "changes", "start", "steps"),
    [
        ("r0", {"init_from": "previous"}, "assets/model", 6),
        ("r1", {"init_from": "previous"}, "rounds/r0/sft/model", 3),
        ("r1", {"init_from": "previous", "continue_epochs": None}, "rounds/r0/sft/model", 6),
        ("r1", {"init_from": "base"}, "assets/model", 6),
    ],
    ids=["the first round", "continued", "with as many epochs", "anew"],
)
def test_sft_starts_from_the_round_before_with_fewer_epochs(
    make_round: Any, round_: str, changes: dict, start: str, steps: int
) -> None:
    """18 demonstrations are 3 batches of 6."""
    make_round("r0", 1.0)
    params = make_round("r1", 1.0)
    training = {"per_device_train_batch_size": 6, "num_train_epochs": 2, "continue_epochs": 1}
    section = training | {"samples_per_prompt": 1} | changes
    sft(check_params(params.model_dump() | {"sft": section}, "test"), round_)
    folder = Path("rounds") / round_ / "sft"
    assert json.loads((folder / "metrics.json").read_text())["steps"] == steps
    assert json.loads((folder / "manifest.json").read_text())["started_from"] == start


def train_reward(params: Params, section: dict, patch: pytest.MonkeyPatch) -> str:
    """Train the reward model of r1 for one step of no length; returns what it started from."""
    still = {"max_steps": 1, "learning_rate": 1e-12}
    params = check_params(params.model_dump() | {"reward": still | section}, "test")
    patch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    reward(params, "r1")
    started_from: str = json.loads(Path("rounds/r1/reward/manifest.json").read_text())[
        "started_from"
    ]
    return started_from


def test_by_default_the_reward_model_starts_anew_from_the_rounds_sft_model(
    make_round: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_round("r0", 1.0)
    assert train_reward(make_round("r1", 1.0), {}, monkeypatch) == "rounds/r1/sft/model"


def test_each_reward_model_continues_from_its_own(
    make_round: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge of r0 has a head of its own; a learning rate of nearly 0 moves none."""
    make_round("r0", 1.0)
    params = make_round("r1", 1.0)
    judge = Path("rounds/r0/reward/judge")
    shutil.copytree("rounds/r0/reward/model", judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.mul_(-3.0)
    model.save_pretrained(judge)
    section = {"judge_share": 0.5, "init_from": "previous"}
    assert train_reward(params, section, monkeypatch) == "rounds/r0/reward/model"
    for name in ("model", "judge"):
        before, after = (
            load_file(Path("rounds") / round_ / "reward" / name / "model.safetensors")
            for round_ in ("r0", "r1")
        )
        torch.testing.assert_close(after["score.weight"], before["score.weight"])
