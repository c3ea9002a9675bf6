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
    tokenizer: of the reward model. ends: texts of the tokens that end a response. max_tokens:
    positions of the model.
    """

    tokenizer: Any
    ends: tuple[str, ...]
    max_tokens: int

    def encode(self, query: str, prompt: str | None) -> TokenIds:
        """The tokens of a rendered prompt with its response, ending with one EOS.

        In training, prompt and response are tokenised separately. So without `prompt`, or with one
        that `query` does not begin with, the tokens at their border may differ from training.

        Raises:
            TextTooLong: names the number of tokens.
        """
        query = self.without_ends(query)
        parts = [query]
        if prompt and query.startswith(prompt):
            parts = [prompt, query[len(prompt) :]]
        # special tokens are in the text: Rondo's rendering has its BOS there
        ids = [self.tokenizer(part, add_special_tokens=False).input_ids for part in parts]
        ids[0] = with_bos(self.tokenizer, ids[0])
        tokens = [*(token for part in ids for token in part), self.tokenizer.eos_token_id]
        if len(tokens) > self.max_tokens:
            raise TextTooLong(f"has {len(tokens)} tokens, the model takes {self.max_tokens}")
        return tokens

    def without_ends(self, query: str) -> str:
        """The text without padding, and without end tokens at its end.

        A chat template may end the assistant's turn with white space after the end token.
        """
        pad = self.tokenizer.pad_token
        while query.startswith(pad):
            query = query.removeprefix(pad)
        while end := next((e for e in (pad, *self.ends) if query.rstrip().endswith(e)), None):
            query = query.rstrip().removesuffix(end)
        return query
