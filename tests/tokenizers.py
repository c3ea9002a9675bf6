"""Tokenizers that several tests need."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaTokenizer

from stages.assets.base_model import tiny_tokenizer
from stages.assets.datasets import tiny_texts

ZEPHYR_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content']"
    " + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def add_token(folder: Path) -> None:
    """Give the tokenizer saved in a folder one token more."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 999, "content": "<x>"})
    path.write_text(json.dumps(tokenizer))


def make_bos_tokenizer() -> Any:
    """A tokenizer that begins texts with BOS, as that of Llama 3; its chat template does not."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    bos = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[bos]
    )
    return tokenizer


def make_boundary_tokenizer(kind: str) -> Any:
    """A LlamaTokenizer, which puts a word boundary `▁` before each text, and reads characters that
    it does not know as bytes.

    kind: `first` or `always` (`legacy`), of its Metaspace; `normalizer`, as in the tokenizer.json
    of Llama 2, TinyLlama, Mistral 7B and Phi-3.
    """
    corpus = [text for _, text in tiny_texts()]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["▁"], show_progress=False)
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<pad>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *model["vocab"],
    ]
    tokenizer = LlamaTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge) for merge in model["merges"]],
        legacy=kind == "always",
        add_bos_token=True,
        pad_token="<pad>",
        chat_template=ZEPHYR_TEMPLATE,
        padding_side="left",
    )
    if kind == "normalizer":
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([prepend, replace])
        tokenizer.backend_tokenizer.pre_tokenizer = None
    return tokenizer
