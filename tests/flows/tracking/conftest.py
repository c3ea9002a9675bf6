"""A project with the models of one round, and MLflow's folder."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch
import yaml
from dvc.repo import Repo
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.assets.base_model import write_model
from stages.gate.verdict import run_gate
from stages.lib.core.files import write_json
from stages.lib.core.params import check_params
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.saving import save_model
from tests.stages.conftest import SMALL, write_adapter, write_data

OUTPUTS = {
    "prepare": ["data"],
    "sft": ["model"],
    "reward": ["model"],
    "ppo": ["policy", "checkpoints"],
}
EVALUATION = {
    "sft": {"kl": 0.0, "repetition_3": 0.0, "eos_rate": 0.7},
    "ppo": {"kl_per_token": 0.4, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.9},
    "checkpoints": {"step_00002": {"kl": 2.0}, "step_00004": {"kl": 5.0}},
    **dict.fromkeys(("win_rate", "win_rate_low", "win_rate_high"), 0.8),
    **dict.fromkeys(("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")),
    "human_nll_rise": 0.0,
}
METRICS = {
    "ppo": {"dangers": 0, "policy_update": 4},
    "reward": {"accuracy": 0.8},
    "replay": {"regressed": 0},
    "capability": {"worst_fall": None},
    "evaluate": EVALUATION,
}


def build(folder: Path) -> None:
    """A DVC project with the files of one round; its policy is the checkpoint step_00004."""
    round_ = folder / "rounds/r0"
    params = check_params(SMALL, "test")
    (folder / "params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    write_data(round_ / "prepare/data")
    write_model(params, folder / "assets/model")
    tokenizer = load_tokenizer(folder / "assets/model")
    sft = AutoModelForCausalLM.from_pretrained(folder / "assets/model", dtype=torch.float32)
    torch.manual_seed(7)
    reward = AutoModelForSequenceClassification.from_pretrained(
        folder / "assets/model", num_labels=1, dtype=torch.float32
    )
    reward.config.mean, reward.config.std = 0.5, 2.0
    save_model(sft, tokenizer, round_ / "sft/model")
    save_model(reward, tokenizer, round_ / "reward/model")
    for name, seed in {"policy": 1, "checkpoints/step_00002": 2}.items():
        write_adapter(sft, round_ / "ppo" / name, seed)
    copytree(round_ / "ppo/policy", round_ / "ppo/checkpoints/step_00004")
    for stage, metrics in METRICS.items():
        write_json(round_ / stage / "metrics.json", metrics)
    stages = {
        f"{stage}-r0": {"cmd": "true", "outs": [f"rounds/r0/{stage}/{out}" for out in outs]}
        for stage, outs in OUTPUTS.items()
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    Repo.init(str(folder), no_scm=True).close()
    with Repo(str(folder)) as repo:
        repo.commit(force=True)
    # without `foreach`, DVC allows no @ in the name of a stage
    lock = folder / "dvc.lock"
    lock.write_text(lock.read_text().replace("-r0:", "@r0:"))


@pytest.fixture
def models(
    built_once: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The project as working directory, with the verdict of its promotion gate."""
    folder = tmp_path / "project"
    copytree(built_once("models", build), folder)
    monkeypatch.chdir(folder)
    run_gate(check_params(SMALL, "test"), "promote", "r0")
    return folder


@pytest.fixture
def home(tmp_path: Path, empty_tables: Path) -> Path:
    """MLflow's folder, with the .rondo folder of the runs."""
    folder = tmp_path / "home/.rondo"
    folder.mkdir(parents=True)
    copy(empty_tables, folder / "mlflow.db")
    return folder
