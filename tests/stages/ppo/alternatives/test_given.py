"""A policy that others trained, in place of training one (ppo.model)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.assets.inputs import main as inputs
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.data.rollouts import read_rollouts
from stages.ppo.__main__ import main
from stages.replay.__main__ import main as replay
from tests.tokenizers import add_token

FOLDER, SFT = Path("rounds/r0/ppo"), Path("rounds/r0/sft/model")
ADAPTER = "adapter_model.safetensors"


def given(params: Params, folder: str) -> Params:
    """The params of a round that takes the policy in `folder`, which the stage `inputs` hashes."""
    taking = params.model_dump(mode="json")
    taking["ppo"] |= {"model": folder, "target_kl_per_token": 0.0005}
    Path("params.yaml").write_text(yaml.safe_dump(taking))
    params = check_params(taking, "test")
    inputs(params, "r0")
    return params


@pytest.fixture
def trained(make_params) -> Params:
    """The params that trained the adapter in `mine`."""
    params = make_params("rloo", {"num_generations": 2}, learning_rate=0.01, max_steps=2)
    main(params, "r0")
    shutil.copytree(FOLDER / "checkpoints/step_00002", "mine")
    shutil.rmtree(FOLDER)
    return params


def test_an_adapter_is_kept_as_it_is_evaluated_and_mined(trained: Params) -> None:
    params = given(trained, "mine")
    main(params, "r0")
    metrics = json.loads((FOLDER / "metrics.json").read_text())
    # not scaled to the target KL
    assert (metrics["updates"], metrics["policy_update"], metrics["policy_scale"]) == (1, 1, 1.0)
    assert metrics["validation_kl_per_token"] > 0.0005
    torch.testing.assert_close(load_file(FOLDER / "policy" / ADAPTER), load_file(f"mine/{ADAPTER}"))
    assert {row["update"] for row in read_rollouts(FOLDER / "rollouts")} == {0, 1}
    evaluate(params, "r0")
    evaluated = json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())
    assert evaluated["reproduced"] and evaluated["ppo"]["kl"] > 0.0
    replay(params, "r0")
    assert json.loads(Path("rounds/r0/replay/metrics.json").read_text())["badcases"] > 0


def test_an_adapter_of_the_hub(trained: Params, to_hub: Callable[[str], str]) -> None:
    shutil.copy(f"mine/{ADAPTER}", "expected")
    main(given(trained, to_hub("mine")), "r0")
    torch.testing.assert_close(load_file(FOLDER / "policy" / ADAPTER), load_file("expected"))


def test_whole_weights_are_the_same_policy_as_their_adapter(trained: Params) -> None:
    main(given(trained, "mine"), "r0")
    adapter = json.loads((FOLDER / "metrics.json").read_text())
    sft = AutoModelForCausalLM.from_pretrained(SFT, dtype=torch.float32)
    PeftModel.from_pretrained(sft, "mine").merge_and_unload().save_pretrained("whole")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SFT / name, "whole")
    shutil.rmtree(".rondo/work/r0/ppo")
    main(given(trained, "whole"), "r0")
    whole = json.loads((FOLDER / "metrics.json").read_text())
    assert (FOLDER / "policy/model.safetensors").exists()
    for name in ("validation_kl", "score_mean", "validation_judge_score"):
        assert whole[name] == pytest.approx(adapter[name], rel=1e-3, abs=1e-4)


def test_sft_itself_is_no_policy(trained: Params) -> None:
    shutil.copytree(SFT, "same")
    with pytest.raises(BadInput, match=r"ppo\.model same: it is the SFT model \(KL 0\)"):
        main(given(trained, "same"), "r0")


@pytest.mark.parametrize("changed", ["shape", "names"])
def test_an_adapter_of_another_model_is_refused(trained: Params, changed: str) -> None:
    weights = load_file(f"mine/{ADAPTER}")
    name, *_ = [key for key in weights if "lora_A" in key]
    if changed == "shape":
        weights[name] = weights[name][:, :-1].contiguous()
    else:
        del weights[name]
    save_file(weights, f"mine/{ADAPTER}")
    with pytest.raises(BadInput, match=r"ppo\.model mine: it was not trained from this round's"):
        main(given(trained, "mine"), "r0")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", b"{", r"mine/adapter_config\.json"),
        (ADAPTER, b"cut", rf"mine/{ADAPTER}: no safetensors file"),
        (ADAPTER, None, rf"mine/{ADAPTER} is missing"),
    ],
)
def test_a_damaged_adapter_is_named(
    trained: Params, file: str, content: bytes | None, message: str
) -> None:
    Path("mine", file).unlink()
    if content is not None:
        Path("mine", file).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        main(given(trained, "mine"), "r0")


def test_a_model_with_more_layers_is_refused(trained: Params) -> None:
    """Not cut to the layers that the SFT model has."""
    model = AutoModelForCausalLM.from_pretrained(SFT)
    config = model.config
    config.num_hidden_layers += 1
    AutoModelForCausalLM.from_config(config).save_pretrained("larger")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SFT / name, "larger")
    with pytest.raises(BadInput, match=r"ppo\.model larger: it was not trained from this round's"):
        main(given(trained, "larger"), "r0")


def test_other_tokens_and_a_changed_folder_are_refused(trained: Params) -> None:
    params = given(trained, "mine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SFT / name, "mine")
    with pytest.raises(BadInput, match="changed after the run began"):
        main(params, "r0")
    add_token(Path("mine"))
    with pytest.raises(BadInput, match=r"ppo\.model mine: its tokens are not those of"):
        main(given(trained, "mine"), "r0")


def test_an_engine_has_nothing_to_train(trained: Params) -> None:
    params = trained.model_dump(mode="json")
    params["ppo"] |= {"model": "mine", "engine": "verl"}
    with pytest.raises(BadInput, match="nothing is left for engine verl to train"):
        check_params(params, "test")
