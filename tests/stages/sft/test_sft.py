"""What the SFT stage records for later stages, and its statistics, counted by hand."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json
from stages.lib.core.params import Params
from stages.lib.lm.responses import Response
from stages.lib.lm.saving import saved_weights_hash
from stages.ppo.common.reference import check_reference_files
from stages.sft.__main__ import VerbatimIndex, compare_with_demonstrations, main
from tests.tokenizers import add_token


def test_the_manifest_has_the_hash_of_the_weights_and_the_model_its_end_tokens(
    make_round: Any,
) -> None:
    params = make_round("r0", 1.0)
    sft, base = Path("rounds/r0/sft"), Path("assets/model")
    shutil.rmtree(sft)
    shutil.copytree(base.resolve(), copy := Path("copy"))
    base.unlink()
    copy.rename(base)
    eos = AutoTokenizer.from_pretrained(base).eos_token_id
    GenerationConfig(eos_token_id=[eos, 9]).save_pretrained(base)
    params.sft = params.sft.model_copy(update={"max_steps": 1, "samples_per_prompt": 1})
    main(params, "r0")
    assert read_json(sft / "manifest.json", "")["weights"] == saved_weights_hash(sft / "model")
    check_reference_files(sft)
    ends = GenerationConfig.from_pretrained(sft / "model").eos_token_id
    assert set(ends) == {eos, 9}  # type: ignore[arg-type]


@pytest.fixture
def given(make_round: Any) -> Params:
    """The params of a round that takes the SFT model in `mine`, an adapter of the base model."""
    params: Params = make_round("r0", 1.0)
    shutil.rmtree("rounds/r0/sft")
    model = AutoModelForCausalLM.from_pretrained("assets/model", dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    torch.nn.init.normal_(adapted.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    adapted.save_pretrained("mine")
    params.sft = params.sft.model_copy(update={"model": "mine", "samples_per_prompt": 1})
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    inputs(params, "r0")
    return params


def test_a_given_model_is_measured_and_none_is_trained(given: Params) -> None:
    main(given, "r0")
    metrics, manifest = (
        read_json(Path(f"rounds/r0/sft/{name}.json"), "") for name in ("metrics", "manifest")
    )
    assert (metrics["steps"], metrics["train_rows"], manifest["started_from"]) == (0, 0, "mine")
    assert metrics["loss_after"] != metrics["loss_before"] and metrics["eos_rate"] is not None
    base = AutoModelForCausalLM.from_pretrained("assets/model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, "mine").merge_and_unload()
    saved = load_file("rounds/r0/sft/model/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(saved[name], merged.state_dict()[name].to(saved[name].dtype))


def test_a_given_model_may_be_of_the_hub(given: Params, to_hub: Callable[[str], str]) -> None:
    given.sft.model = to_hub("mine")
    inputs(given, "r0")
    assert read_json(Path("assets/inputs/sft_model.json"), "") == {}
    main(given, "r0")
    manifest = read_json(Path("rounds/r0/sft/manifest.json"), "")
    assert manifest["started_from"] == given.sft.model


def test_a_given_model_needs_no_demonstrations(given: Params) -> None:
    for part in ("train", "eval"):
        Path(f"rounds/r0/prepare/data/sft_{part}.jsonl").write_text("")
    main(given, "r0")
    assert read_json(Path("rounds/r0/sft/manifest.json"), "")["started_from"] == "mine"
    base, saved = (
        load_file(path)["model.layers.0.self_attn.q_proj.weight"].float()
        for path in ("assets/model/model.safetensors", "rounds/r0/sft/model/model.safetensors")
    )
    assert not torch.equal(base, saved)


def test_a_given_model_with_other_tokens_is_refused(given: Params) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"assets/model/{name}", "mine")
    add_token(Path("mine"))
    with pytest.raises(BadInput, match="changed after the run began"):
        main(given, "r0")
    inputs(given, "r0")
    with pytest.raises(BadInput, match=r"sft\.model mine: its tokens are not those of"):
        main(given, "r0")


DEMONSTRATION = "the quick brown fox jumps over the lazy dog and runs away"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a quick brown fox sat", 0),  # three in a row: below the shortest run that counts
        ("so The Quick Brown Fox sat", 4),  # case aside
        ("lazy dog and runs away now", 5),
        (DEMONSTRATION, 12),
        # the longer one of two runs
        ("quick brown fox jumps and then over the lazy dog and runs", 6),
        ("", 0),
    ],
)
def test_longest_run_copied(text, words):
    assert VerbatimIndex(["nothing of the kind", DEMONSTRATION]).longest(text) == words


def test_a_run_does_not_continue_into_the_next_text():
    index = VerbatimIndex(["one two three four", "five six seven eight"])
    assert index.longest("one two three four five six seven eight") == 4


def test_compare():
    responses = [
        Response([], [1] * 24, "no no no no no", False),
        Response([], [1] * 12, DEMONSTRATION, True),
        Response([], [1] * 2, "well done", True),
        Response([], [1] * 2, "it is fine", False),
    ]
    demonstrations = [
        Response([], [1] * 4, "all is well", True),
        Response([], [1] * 6, "see: the quick brown fox jumps over the lazy dog", True),
    ]
    metrics = compare_with_demonstrations(responses, demonstrations, [DEMONSTRATION])
    assert metrics == {
        "eos_rate": 0.5,
        "eos_rate_demonstrations": 1.0,
        "length": 10.0,
        "length_ratio": 2.0,
        # two of three 3-grams of "no no no no no" repeat an earlier one
        "repetition_3": pytest.approx((2 / 3) / 4),
        "repetition_3_demonstrations": 0.0,
        "memorised": 0.25,
        "memorised_demonstrations": 0.5,  # nine words
        "memorised_words": 12,
    }
