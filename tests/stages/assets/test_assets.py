"""The assets stage without a network: the tiny model and data, local models, files."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from docs.bench.families import random_model
from stages.assets.__main__ import build_folder, main
from stages.assets.base_model import tiny_model, tiny_tokenizer, write_model
from stages.assets.datasets import write_data
from stages.assets.tokenizer import spare_token
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import Dtype
from stages.lib.lm.attention import grouped_attention
from stages.lib.lm.loading import load_tokenizer


def params(**assets: object) -> Params:
    return check_params({"assets": {"model": "tiny", "data": "tiny", **assets}}, "test")


def test_tiny_assets_are_the_same_bytes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        main(params(), "r0")
        hashes.append(file_hash(Path("assets")))
    assert hashes[0] == hashes[1]
    assert sorted(path.name for path in Path("assets").iterdir()) == ["data", "model", "start"]
    assert len(list(Path("assets/start").rglob("EMPTY"))) == 13

    tokenizer = load_tokenizer(Path("assets/model"))
    weights = load_file("assets/model/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.embed_tokens.weight"].shape == (len(tokenizer), 64)
    assert tokenizer.decode(tokenizer("The dinner, at 7 €!").input_ids) == "The dinner, at 7 €!"
    ratings = [
        float(line.split("\t")[1])
        for line in Path("assets/data/tweets.tsv").read_text().splitlines()
    ]
    assert len(ratings) == 400 and min(ratings) < -3 < 3 < max(ratings) <= 4


def test_a_failed_build_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "data"
    with build_folder(target) as folder:
        (folder / "old").write_text("kept")
    with pytest.raises(BadInput), build_folder(target) as folder:
        (folder / "new").write_text("half")
        raise BadInput("no")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "old"]


def test_a_local_model_gets_a_pad_token_that_is_not_eos(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(0)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    write_model(params(model=str(tmp_path / "mine")), tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (saved.pad_token, saved.eos_token, saved.padding_side) == (
        "<|endoftext|>",
        "<|im_end|>",
        "left",
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["pad_token_id"] == 0 and config["eos_token_id"] == 2
    assert str(tmp_path) not in "".join(
        path.read_text() for path in (tmp_path / "out").glob("*.json")
    )


@pytest.mark.parametrize(
    ("configured", "template", "expected"),
    [
        (2, None, 2),
        (None, None, 2),
        ([0, 2], None, [2, 0]),  # as Qwen2.5-Instruct
        # an instruct model whose turn ends with another token than eos_token, as Gemma 3
        (2, "{{ messages[-1].content }}<|im_start|>\n", [2, 1]),
        (2, "{{ messages[-1].content }}</s> and so on", 2),  # text, no special token
        (2, "{{ raise_exception('no assistant') }}", 2),
        (2, {"chat": "", "tool_use": ""}, 2),  # prepare refuses them, unless its format is plain
    ],
)
def test_all_end_tokens_of_a_local_model_are_written(
    tmp_path: Path, configured: Any, template: Any, expected: Any
) -> None:
    model, tokenizer = tiny_model(0)
    model.generation_config.eos_token_id, tokenizer.chat_template = configured, template
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    write_model(params(model=str(tmp_path / "mine")), tmp_path / "out")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written["eos_token_id"] == expected
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 2


def test_spare_token_prefers_a_token_of_the_vocabulary() -> None:
    tokenizer = tiny_model(0)[1]
    assert spare_token(tokenizer, [tokenizer.eos_token_id]) == "<|endoftext|>"
    # as in Pythia, which has one special token
    tokenizer.eos_token = tokenizer.unk_token = tokenizer.pad_token = "<|endoftext|>"
    assert spare_token(tokenizer, [tokenizer.eos_token_id]) == "<|pad|>"


def local_model(folder: Path, config: PreTrainedConfig, tokenizer: Any) -> str:
    """A folder with a random model whose logits differ enough to see what changes them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_a_pad_gets_a_new_token(tmp_path: Path) -> None:
    """As GPT-2's and Llama 3's; and the new rows of the embeddings are the same each time."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer()._tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    mine = local_model(tmp_path / "mine", LlamaConfig(**SIZES), tokenizer)
    for out in ("one", "two"):
        write_model(params(model=mine), tmp_path / out)
    saved = load_tokenizer(tmp_path / "one")
    assert (saved.pad_token, saved.pad_token_id, len(saved)) == ("<|pad|>", 435, 436)
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert (config["vocab_size"], config["pad_token_id"]) == (448, 435)
    assert file_hash(tmp_path / "one") == file_hash(tmp_path / "two")


def test_a_token_of_the_chat_template_is_no_pad(tmp_path: Path) -> None:
    """Qwen2.5's base model has `<|endoftext|>` as eos and pad, and no bos."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer()._tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=tiny_tokenizer().chat_template,
    )
    assert spare_token(tokenizer, [tokenizer.eos_token_id]) == "<|pad|>"
    tokenizer.pad_token = "<|im_start|>"
    mine = local_model(tmp_path / "mine", LlamaConfig(**SIZES), tokenizer)
    write_model(params(model=mine), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token == "<|pad|>"


SIZES: dict[str, Any] = {
    "vocab_size": 435,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "sampling differ from those of .* pass a state from token to token.*another"),
        ("nemotron", "; set model.attn_implementation to sdpa$"),
    ],
)
def test_an_architecture_of_which_numbers_differ_is_refused(
    tmp_path: Path, family: str, message: str
) -> None:
    mine = random_model(family, tmp_path / "mine")
    with pytest.raises(BadInput, match=message) as refused:
        write_model(params(model=str(mine)), tmp_path / "out")
    assert "copy the model again" not in str(refused.value)
    assert str(mine) in str(refused.value)


def test_an_attention_that_ignores_what_a_model_passes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_softcap(*tensors: Any, softcap: float | None = None, **more: Any) -> Any:
        return grouped_attention(*tensors, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, "grouped", without_softcap)
    mine = local_model(
        tmp_path / "mine", Gemma2Config(**SIZES, attn_logit_softcapping=0.5), tiny_tokenizer()
    )
    settings = params(model=mine)
    settings.model.attn_implementation = "grouped"
    message = r"its log-probabilities differ .* by 0\.\d+ nats per token.*; set .* to (sdpa|eager)$"
    with pytest.raises(BadInput, match=message):
        write_model(settings, tmp_path / "out")


def test_the_numbers_are_compared_in_float32(tmp_path: Path) -> None:
    """RecurrentGemma differs by less than bfloat16's 0.1 nats per token."""
    settings = params(model=str(random_model("recurrent_gemma", tmp_path / "mine")))
    settings.model.dtype = Dtype.bfloat16
    with pytest.raises(BadInput, match=r"differ .* by 0\.0\d+ .*, at most 0\.0001 is rounding"):
        write_model(settings, tmp_path / "out")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def remove_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "mine/base"}')


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_weight, r"model\.layers\.1\.mlp\.up_proj\.weight is missing in its weights"),
        (make_adapter, "it is an adapter of PEFT; merge it"),
        (truncate, r"model\.safetensors: no safetensors file"),
        (lambda folder: change_config(folder, auto_map=CODE, model_type="x"), "code of its own"),
        (
            lambda folder: change_config(folder, quantization_config={"quant_method": "gptq"}),
            r"quantised \(gptq, ",
        ),
        (lambda folder: change_config(folder, model_type="t5"), "no AutoModelForCausalLM for"),
    ],
    ids=["weights", "adapter", "truncated", "code", "quantised", "t5"],
)
def test_a_folder_that_is_no_whole_language_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asks whether to run code"))
    mine = local_model(tmp_path / "mine", LlamaConfig(**SIZES), tiny_tokenizer())
    spoil(tmp_path / "mine")
    with pytest.raises(BadInput, match=message) as refused:
        write_model(params(model=mine), tmp_path / "out")
    assert "trust_remote_code" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tied", "message"), [(False, r"lm_head\.weight is missing"), (True, "it is a classifier")]
)
def test_a_classifier_is_no_language_model(tmp_path: Path, tied: bool, message: str) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "mine")
    tiny_tokenizer().save_pretrained(tmp_path / "mine")
    with pytest.raises(BadInput, match=message):
        write_model(params(model=str(tmp_path / "mine")), tmp_path / "out")


class OtherClassifier(LlamaForSequenceClassification):
    """One that computes other states than the language model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda _, __, states: states * 1.1)


def test_a_classifier_with_states_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = AutoModelForSequenceClassification._model_mapping._extra_content
    monkeypatch.setitem(classes, LlamaConfig, OtherClassifier)
    mine = local_model(tmp_path / "mine", LlamaConfig(**SIZES), tiny_tokenizer())
    with pytest.raises(BadInput, match="a classifier with the same weights has other states"):
        write_model(params(model=mine), tmp_path / "out")


def test_a_reserved_pad_token_is_used() -> None:
    tokenizer = tiny_model(0)[1]
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|finetune_right_pad_id|>"]})
    assert spare_token(tokenizer, [tokenizer.eos_token_id]) == "<|finetune_right_pad_id|>"


def test_a_vocabulary_that_must_grow_becomes_a_multiple_of_64(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(0)
    assert model.config.vocab_size == len(tokenizer) == 435
    tokenizer.eos_token = tokenizer.unk_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_tokens(["<pad>"])
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    old = load_file(tmp_path / "mine/model.safetensors")["model.embed_tokens.weight"]
    write_model(params(model=str(tmp_path / "mine")), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    embeddings = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    assert config["vocab_size"] == 448 and embeddings.shape == (448, 64)
    assert torch.equal(embeddings[:435], old.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("file", "message"),
    [("pytorch_model.bin", r"no \*\.safetensors"), ("model.safetensors", "cannot load")],
)
def test_a_model_that_is_not_safetensors_is_refused(
    tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(BadInput, match=message):
        write_model(params(model=str(tmp_path)), tmp_path / "out")


def test_files_of_the_user_stay_where_they_are(tmp_path: Path) -> None:
    write_data(params(data="files"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["SOURCE.txt"]


def test_a_data_set_is_written_as_train_and_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` reads a local folder in the same way as a hub repository."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repository/harmless").mkdir(parents=True)
    for split, answer in (("train", "yes"), ("test", "no")):
        (tmp_path / f"repository/harmless/{split}.jsonl").write_text(
            json.dumps({"chosen": answer, "rejected": "é"}) + "\n"
        )
    out = tmp_path / "out"
    out.mkdir()
    write_data(params(data=str(tmp_path / "repository"), data_config="harmless"), out)
    train, held_out = ((out / f"{name}.jsonl").read_text("utf-8") for name in ("train", "eval"))
    assert train == '{"chosen": "yes", "rejected": "é"}\n'
    assert held_out == '{"chosen": "no", "rejected": "é"}\n'
