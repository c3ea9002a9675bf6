"""Folders of models of which one file is damaged: config, tokenizer, weights, adapter."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.lm.loading import (
    load_causal_lm,
    load_policy,
    load_reward_model,
    load_sequence_classifier,
    load_tokenizer,
)
from stages.lib.lm.reward_ensemble import calibrate_scores
from stages.prepare import __main__ as prepare
from tests.faults.harness import Trials
from tests.faults.mutations import mutated_bytes, mutated_json
from tests.faults.scale import trials
from tests.flows.serving.conftest import models, params  # noqa: F401 - fixtures

Read = Callable[[Path], Any]


@pytest.fixture
def good(models: Path, params: Params, tmp_path: Path) -> Path:  # noqa: F811
    """A folder with `base`, `reward` and `adapter`, for a test to damage."""
    shutil.copytree(models / "assets/model", tmp_path / "base")
    shutil.copytree(models / "reward", tmp_path / "reward")
    adapted = get_peft_model(
        load_causal_lm(tmp_path / "base", params.model),
        LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path


def damaged(rng: random.Random, content: bytes, name: str) -> bytes:
    """One to three changes; of weights, mostly of the header with names, types and shapes."""
    if name.endswith(".json"):
        value = json.loads(content)
        return mutated_json(rng, value) if rng.random() < 0.7 else mutated_bytes(rng, content)
    size = 8 + int.from_bytes(content[:8], "little")
    header, data = content[:size], content[size:]
    if rng.random() < 0.2:
        return content[: rng.randrange(len(content))]
    if rng.random() < 0.5:
        changed = mutated_json(rng, json.loads(header[8:]))
        return len(changed).to_bytes(8, "little") + changed + data
    return mutated_bytes(rng, header) + data


def same_weights(folder: Path, model: Any) -> None:
    """No weight of the files was left out or drawn at random."""
    saved = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    own = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in saved.items():
        assert torch.equal(own[name].float(), tensor.float()) or tensor.isnan().any(), name


@pytest.mark.parametrize(
    ("folder", "name", "fast", "all_"),
    [
        ("base", "config.json", 40, 300),
        ("base", "model.safetensors", 40, 300),
        ("reward", "config.json", 30, 200),
        ("reward", "model.safetensors", 40, 150),
        ("adapter", "adapter_config.json", 30, 150),
        ("adapter", "adapter_model.safetensors", 30, 150),
    ],
)
def test_models(
    good: Path,
    params: Params,  # noqa: F811
    folder: str,
    name: str,
    fast: int,
    all_: int,
) -> None:
    read: dict[str, Read] = {
        "base": lambda path: load_causal_lm(path, params.model),
        "reward": lambda path: load_reward_model(path, params.model),
        "adapter": lambda path: load_policy(good / "base", path, params.model),
    }
    path = good / folder / name
    content = path.read_bytes()

    def load(bad: bytes) -> Any:
        path.write_bytes(bad)
        return read[folder](good / folder)

    def check(_: bytes, model: Any) -> None:
        same_weights(good / folder, model)
        if folder == "reward":
            assert torch.isfinite(calibrate_scores(torch.zeros(1), model)).all()

    Trials(f"models: {name}", rf"{folder}").run(
        trials(fast, all_),
        lambda rng: damaged(rng, content, name),
        load,
        check,
        # transformers builds the config's model, of its default sizes if some are lost, before it
        # compares the weights
        seconds=5.0,
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(good: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the stages with models, and by prepare, which has its own reader."""
    path = good / "base" / name
    content = path.read_bytes()
    monkeypatch.setattr(prepare, "MODEL", good / "base")
    size = len(load_tokenizer(good / "base"))

    def load(bad: bytes) -> Any:
        path.write_bytes(bad)
        tokenizers = load_tokenizer(good / "base"), prepare.read_tokenizer()
        return [tokenizer("The dinner").input_ids for tokenizer in tokenizers]

    def check(_: bytes, ids: Any) -> None:
        assert all(0 <= token < size + 1000 for tokens in ids for token in tokens)

    Trials(f"models: {name}", r"base").run(
        trials(20, 200), lambda rng: damaged(rng, content, name), load, check
    )


def test_a_missing_weight_is_not_drawn_at_random(good: Path, params: Params) -> None:  # noqa: F811
    """Also of a causal LM that becomes a reward model, which lacks only the head."""
    path = good / "base/model.safetensors"
    weights = load_file(path)
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: weights[name] for name in weights if name != lost}, path, {"format": "pt"})
    for load in (load_causal_lm, load_sequence_classifier):
        with pytest.raises(BadInput, match=rf"base: {lost} is missing in its weights"):
            load(good / "base", params.model)


def test_a_layer_is_not_left_out(good: Path, params: Params) -> None:  # noqa: F811
    config = json.loads((good / "base/config.json").read_text())
    (good / "base/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(BadInput, match=r"the weights have .*layers\.1.*no layer of config\.json"):
        load_causal_lm(good / "base", params.model)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "head_dim"])
def test_a_huge_size_allocates_nothing(good: Path, params: Params, key: str) -> None:  # noqa: F811
    config = json.loads((good / "base/config.json").read_text())
    (good / "base/config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(BadInput, match=rf"config\.json: {key} is 1000000000, expected 1 to"):
        load_causal_lm(good / "base", params.model)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("std", 0.0, "above 0"), ("std", math.nan, "above 0"), ("mean", "0.5", "that is finite")],
)
def test_a_calibration_that_is_no_number(
    good: Path,
    params: Params,  # noqa: F811
    key: str,
    value: Any,
    expected: str,
) -> None:
    """A constant reward model has a standard deviation of 0: its scores would be infinite."""
    config = json.loads((good / "reward/config.json").read_text())
    (good / "reward/config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(BadInput, match=rf"config\.json: {key} is .*expected a number {expected}"):
        load_reward_model(good / "reward", params.model)


def test_a_tokenizer_of_another_model(good: Path) -> None:
    config = json.loads((good / "base/config.json").read_text())
    (good / "base/config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    with pytest.raises(BadInput, match=r"base: config\.json's vocab_size is 7, but the tok"):
        load_tokenizer(good / "base")
