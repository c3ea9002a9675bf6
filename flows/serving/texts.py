"""Texts that engines send, as the tokens that the reward model was trained on."""

from dataclasses import dataclass
from typing import Any

from stages.lib.core.types import TokenIds
from stages.lib.data.prompts import continuing_tokens, with_bos

CHARACTERS_PER_TOKEN = 64  # at most; more are refused before they are tokenised


class Unreadable(Exception):
    """A text has more tokens than the limit, or there is no such token."""


@dataclass(frozen=True)
class Texts:
    """
    tokenizer: of the reward model. ends: texts of the tokens that end a response. max_tokens: of a
    text, EOS included.
    """

    tokenizer: Any
    ends: tuple[str, ...]
    max_tokens: int

    def encode(self, query: str | TokenIds, prompt: str | None) -> TokenIds:
        """The tokens of a rendered prompt with its response, ending with one EOS; tokens are taken
        as they are.

        In training, prompt and response are tokenised separately. So without `prompt`, or with one
        that `query` does not begin with, the tokens at their border may differ from training.

        Raises:
            Unreadable: names the number of tokens, or of characters if these are too many to be
                tokenised; or the token that the tokenizer lacks.
        """
        if isinstance(query, list):
            return self.checked(query)
        if len(query) > CHARACTERS_PER_TOKEN * self.max_tokens:
            raise Unreadable(
                f"has {len(query)} characters, the limit is {self.max_tokens} tokens: send a "
                "shorter text"
            )
        query = self.without_ends(query)
        first, response = query, ""
        if prompt and query.startswith(prompt):
            first, response = prompt, query[len(prompt) :]
        # special tokens are in the text: Rondo's rendering has its BOS there
        ids = with_bos(self.tokenizer, self.tokenizer(first, add_special_tokens=False).input_ids)
        ids += continuing_tokens(self.tokenizer, response)
        return self.checked([*ids, self.tokenizer.eos_token_id])

    def checked(self, tokens: TokenIds) -> TokenIds:
        """The tokens, if the model can read them."""
        if len(tokens) > self.max_tokens:
            raise Unreadable(
                f"has {len(tokens)} tokens, the limit is {self.max_tokens}: send a shorter text"
            )
        size = len(self.tokenizer)
        if unknown := [token for token in tokens if not 0 <= token < size]:
            raise Unreadable(f"the tokenizer has no token {unknown[0]}: it has {size}")
        return tokens

    def without_ends(self, query: str) -> str:
        """The text without padding, and without end tokens at its end.

        A chat template may end the assistant's turn with white space after the end token.
        """
        pad, start, end = self.tokenizer.pad_token, 0, len(query)
        while query.startswith(pad, start):
            start += len(pad)
        while True:
            before = end  # the end without white space
            while before > start and query[before - 1].isspace():
                before -= 1
            token = next((e for e in (pad, *self.ends) if query.endswith(e, start, before)), None)
            if token is None:
                return query[start:end]
            end = before - len(token)
