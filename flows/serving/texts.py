"""Texts that engines send, as the tokens that the reward model was trained on."""

from dataclasses import dataclass
from typing import Any

from stages.lib.core.types import TokenIds
from stages.lib.data.prompts import with_bos


class TextTooLong(Exception):
    """A text has more tokens than the model has positions."""


@dataclass(frozen=True)
class Texts:
    """
    tokenizer: of the reward model. ends: tokens that an engine may leave at the end of a text.
    max_tokens: positions of the model.
    """

    tokenizer: Any
    ends: frozenset[int]
    max_tokens: int

    def encode(self, query: str, prompt: str | None) -> TokenIds:
        """The tokens of a rendered prompt with its response, ending with one EOS.

        In training, prompt and response are tokenised separately. So without `prompt`, or with one
        that `query` does not begin with, the tokens at their border may differ from training.

        Raises:
            TextTooLong: names the number of tokens.
        """
        parts = [query]
        if prompt and query.startswith(prompt):
            parts = [prompt, query[len(prompt) :]]
        # engines leave special tokens in the text, and Rondo's rendering has its BOS there
        ids = [self.tokenizer(part, add_special_tokens=False).input_ids for part in parts]
        first, last, pad = ids[0], ids[-1], self.tokenizer.pad_token_id
        while first and first[0] == pad:
            first.pop(0)
        while last and (last[-1] == pad or last[-1] in self.ends):
            last.pop()
        ids[0] = with_bos(self.tokenizer, first)
        tokens = [*(token for part in ids for token in part), self.tokenizer.eos_token_id]
        if len(tokens) > self.max_tokens:
            raise TextTooLong(f"has {len(tokens)} tokens, the model takes {self.max_tokens}")
        return tokens
