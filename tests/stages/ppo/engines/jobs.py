"""Jobs of engines, for tests."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from transformers import AutoModelForSequenceClassification

from stages.lib.core.params import Params, check_params
from stages.ppo.engines import JOBS
from tests import engine_settings

HERE = Path(__file__).parent
VERL_WHEEL = os.environ.get("VERL_WHEEL", "")
needs_verl = pytest.mark.skipif(not VERL_WHEEL, reason="needs verl's wheel: make test-engines")
# no two settings have the same value
DISTINCT = {
    "batch_size": 48,
    "mini_batch_size": 16,
    "micro_batch_size": 2,
    "total_episodes": 480,
    "num_ppo_epochs": 3,
    "response_length": 100,
    "temperature": 0.7,
    "learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "warmup_updates": 2,
    "max_grad_norm": 0.5,
    "gamma": 0.99,
    "lam": 0.9,
    "cliprange": 0.15,
    "cliprange_value": 0.3,
    "entropy_coef": 0.001,
    "kl_coef": 0.02,
    "score_clip": 4.0,
    "validation_updates": 5,
    "gradient_checkpointing": True,
}


def settings(engine: str, gpus: int = 8, nodes: int = 1, **ppo: Any) -> Params:
    launcher = {"ray_address": "http://ray:8265", "nodes": nodes, "gpus_per_node": gpus}
    section = engine_settings.NEEDED | {"engine": engine, "micro_batch_size": 2} | ppo
    return check_params({"ppo": section, "launcher": launcher}, "test")


def distinct(engine: str, gpus: int, **ppo: Any) -> Params:
    params = settings(engine, gpus, **DISTINCT | ppo)
    params.prepare.max_prompt_tokens, params.seed = 64, 7
    return params


def job_of(params: Params, folder: Path = Path("/work"), models: Path = Path("/")) -> Any:
    return JOBS[params.ppo.engine.value](params, folder, models / "sft", models / "reward")


def install(folder: Path, **versions: str) -> None:
    """A folder for PYTHONPATH in which OpenRLHF's command is the stand-in, and whose metadata say
    that engines are installed.
    """
    command = folder / "openrlhf/cli/train_ppo_ray.py"
    command.parent.mkdir(parents=True)
    (folder / "openrlhf/__init__.py").touch()
    shutil.copy(HERE / "stand_in/train_ppo_ray.py", command)
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def unpack_verl() -> Path:
    """The files of verl's wheel, which `make test-engines` names."""
    folder = Path(VERL_WHEEL).with_suffix("")
    if not folder.exists():
        with ZipFile(VERL_WHEEL) as archive:
            archive.extractall(folder)
    return folder


class Letters:
    """A tokenizer whose tokens are letters, but for `th`, which is one."""

    bos_token, bos_token_id, eos_token_id = None, None, 2

    def __call__(self, text: Any, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        if isinstance(text, list):
            rows = [self(one, add_special_tokens).input_ids for one in text]
            return SimpleNamespace(input_ids=rows)
        return SimpleNamespace(input_ids=[ord(letter) for letter in text.replace("th", "θ")])


def save_reward_model(folder: Path, tiny_folder: Path) -> None:
    """With a calibration of mean 1.5 and standard deviation 2."""
    reward = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    reward.config.mean, reward.config.std = 1.5, 2.0
    reward.save_pretrained(folder)
