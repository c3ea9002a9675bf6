"""Tokenizers that several tests need."""

from typing import Any

from tokenizers.processors import TemplateProcessing

from stages.assets.base_model import tiny_tokenizer


def make_bos_tokenizer() -> Any:
    """A tokenizer that begins texts with BOS, as that of Llama 3; its chat template does not."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    bos = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[bos]
    )
    return tokenizer
