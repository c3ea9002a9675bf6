"""Each model family is computed as by transformers or refused, as the table in docs/models.md says;
those that run otherwise than Llama go through all stages that run a model. With RONDO_FAMILIES=all
in the environment, each of them does (half an hour).
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.bench.families import CHATS, FAMILIES, PAGE, attempt, params_of, random_model
from stages.annotate.__main__ import main as annotate
from stages.assets.__main__ import main as assets
from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.evaluate.__main__ import main as evaluate
from stages.gate.champion import main as champion
from stages.lib.core.files import read_json
from stages.ppo.__main__ import main as ppo
from stages.prepare.__main__ import main as prepare
from stages.replay.__main__ import main as replay
from stages.reward.__main__ import main as reward
from stages.sft.__main__ import main as sft
from tests.paths import ROOT

# Windows shorter than the texts; layers that pass a state; several states per token and logits with
# a cap; a classifier that transformers does not have
SAMPLE = ("gpt_oss", "qwen3_5_text", "lfm2", "gemma3n_text")
STAGES = (inputs, assets, prepare, sft, annotate, reward, battery, champion, ppo, evaluate, replay)
SHORT = {"per_device_train_batch_size": 4, "max_steps": 2, "max_length": 1700}
SETTINGS: dict[str, Any] = {
    "model": {"dtype": "float32", "threads": 1},
    "prepare": {"max_eval_prompts": 4, "max_rows": 24, "max_prompt_tokens": 1500},
    "sft": {**SHORT, "samples_per_prompt": 1},
    "reward": SHORT,
    "ppo": {
        "batch_size": 4,
        "mini_batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 1,
        "response_length": 8,
        "validation_prompts": 2,
        "validation_updates": 1,
        "min_kl_per_token": 0,
    },
}


def rows_of_the_table() -> dict[str, list[str]]:
    """The cells of each family's row in docs/models.md."""
    lines = (ROOT / PAGE).read_text().splitlines()
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|")
    return {row[0]: row[1:] for row in rows if row[0] in FAMILIES}


RIGHT = tuple(name for name, row in rows_of_the_table().items() if row[-1] == "right")
TRAINED = RIGHT if os.environ.get("RONDO_FAMILIES") == "all" else SAMPLE


def test_the_table_has_all_families() -> None:
    rows = rows_of_the_table()
    assert {name: row[0] for name, row in rows.items()} == {
        name: family.models for name, family in FAMILIES.items()
    }
    templates = {name: row[1] for name, row in rows.items() if row[1]}
    assert templates == {name: chat.template for name, chat in CHATS.items()}
    assert set(SAMPLE) <= set(RIGHT)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_right_or_refused_as_the_table_says(name: str, tmp_path: Path) -> None:
    """If this fails: `python docs/bench/families.py --write`, and read the difference."""
    assert list(attempt(name, tmp_path)) == rows_of_the_table()[name][2:]


@pytest.mark.parametrize("name", TRAINED)
def test_a_family_goes_through_all_stages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_processes: None
) -> None:
    monkeypatch.chdir(tmp_path)
    params = params_of(name, random_model(name, tmp_path / "mine"), SETTINGS)
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    for stage in STAGES:
        stage(params, "r0")
    metrics = {
        stage: read_json(Path(f"rounds/r0/{stage}/metrics.json"))
        for stage in ("sft", "reward", "ppo", "evaluate", "replay")
    }
    assert metrics["sft"]["loss_after"] != metrics["sft"]["loss_before"]
    assert metrics["ppo"]["updates"] == 1
    assert 0 <= metrics["evaluate"]["win_rate"] <= 1
