"""Folders of models of which one file is damaged: config, tokenizer, weights, adapter."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
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
from stages.lib.lm.scoring import calibrate_scores
from stages.prepare import sources
from tests.faults.bad import bad_bytes, bad_json, try_bad
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


def damaged(content: bytes, name: str) -> SearchStrategy[bytes]:
    """One to three changes; of weights, of the header with names, types and shapes, or a cut."""
    if name.endswith(".json"):
        return bad_json(json.loads(content)) | bad_bytes(content)
    size = 8 + int.from_bytes(content[:8], "little")
    header, data = content[:size], content[size:]
    other_header = bad_json(json.loads(header[8:])).map(
        lambda changed: len(changed).to_bytes(8, "little") + changed + data
    )
    cut = st.integers(0, len(content) - 1).map(lambda end: content[:end])
    return other_header | cut | bad_bytes(header).map(lambda changed: changed + data)


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
    ("folder", "name"),
    [
        ("base", "config.json"),
        ("base", "model.safetensors"),
        ("reward", "config.json"),
        ("adapter", "adapter_config.json"),
        ("adapter", "adapter_model.safetensors"),
    ],
)
def test_models(
    good: Path,
    params: Params,  # noqa: F811
    folder: str,
    name: str,
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

    try_bad(damaged(content, name), load, check, folder, fast=25, full=150)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(good: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the stages with models, and by prepare, which has its own reader."""
    path = good / "base" / name
    content = path.read_bytes()
    monkeypatch.setattr(sources, "MODEL", good / "base")
    size = len(load_tokenizer(good / "base"))

    def load(bad: bytes) -> Any:
        path.write_bytes(bad)
        tokenizers = load_tokenizer(good / "base"), sources.read_tokenizer()
        return [tokenizer("The dinner").input_ids for tokenizer in tokenizers]

    def check(_: bytes, ids: Any) -> None:
        assert all(0 <= token < size + 1000 for tokens in ids for token in tokens)

    try_bad(damaged(content, name), load, check, "base", fast=15, full=100)


def test_a_missing_weight_is_not_drawn_at_random(good: Path, params: Params) -> None:  # noqa: F811
    """Also of a causal LM that becomes a reward model, which lacks only the head."""
    path = good / "base/model.safetensors"
    weights = load_file(path)
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: weights[name] for name in weights if name != lost}, path, {"format": "pt"})
    for load in (load_causal_lm, load_sequence_classifier):
        with pytest.raises(BadInput, match=rf"base: {lost} is missing in its weights"):
            load(good / "base", params.model)


@pytest.mark.parametrize(
    ("folder", "change", "read", "message"),
    [
        (
            "base",
            {"num_hidden_layers": 1},
            load_causal_lm,
            r"the weights have .*layers\.1.*no layer",
        ),
        (
            "base",
            {"hidden_size": 10**9},
            load_causal_lm,
            "hidden_size is 1000000000, expected 1 to",
        ),
        ("base", {"head_dim": 10**9}, load_causal_lm, "head_dim is 1000000000, expected 1 to"),
        ("base", {"vocab_size": 7}, load_tokenizer, r"vocab_size is 7, but the tok"),
        ("reward", {"std": 0.0}, load_reward_model, "std is .*expected a number above 0"),
        ("reward", {"std": math.nan}, load_reward_model, "std is .*expected a number above 0"),
        (
            "reward",
            {"mean": "0.5"},
            load_reward_model,
            "mean is .*expected a number that is finite",
        ),
    ],
)
def test_a_config_that_does_not_suit_the_weights(
    good: Path,
    params: Params,  # noqa: F811
    folder: str,
    change: dict[str, Any],
    read: Callable[..., Any],
    message: str,
) -> None:
    """No layer is left out, a huge size allocates nothing, and no score becomes infinite."""
    config = json.loads((good / folder / "config.json").read_text())
    (good / folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadInput, match=rf"{folder}.*{message}"):
        read(*(good / folder, params.model)[: 1 if read is load_tokenizer else 2])
