"""The tokens that end a response.

A model may end its responses with several tokens: Qwen2.5-Instruct with `<|im_end|>` or
`<|endoftext|>`, Gemma 3 with `<eos>` or `<end_of_turn>`.
"""

from pathlib import Path
from typing import Any, NamedTuple

from stages.lib.core.types import TokenIds


class EndTokens(NamedTuple):
    """eos: the canonical one, the tokenizer's EOS, which SFT teaches and at which reward models are
    read. others: further tokens with which the model may end a response.

    >>> ends = EndTokens(2, (9,))
    >>> ends.end([7, 2]), ends.end([7, 9]), ends.end([9, 7])
    (True, True, False)
    >>> ends.close([7, 2]), ends.close([7, 9]), ends.close([7])
    ([7, 2], [7, 2], [7, 2])
    """

    eos: int
    others: tuple[int, ...] = ()

    @property
    def ids(self) -> TokenIds:
        """All of them, the canonical one first."""
        return [self.eos, *self.others]

    @classmethod
    def of(cls, generation_config: Any, tokenizer: Any) -> "EndTokens":
        """The tokenizer's EOS, and the end tokens in a model's generation_config."""
        configured = generation_config.eos_token_id
        ids = [configured] if isinstance(configured, int) else configured or []
        eos: int = tokenizer.eos_token_id
        return cls(eos, tuple(token for token in ids if token != eos))

    def end(self, response: TokenIds) -> bool:
        """Whether a response ended, and was not cut off.

        Raises:
            IndexError: the response is empty.
        """
        return response[-1] in self.ids

    def close(self, response: TokenIds) -> TokenIds:
        """The response with the canonical end token at its end: in place of another end token, or
        appended if it was cut off.

        Raises:
            IndexError: the response is empty.
        """
        return [*(response[:-1] if self.end(response) else response), self.eos]

    def cut(self, tokens: TokenIds) -> TokenIds:
        """The tokens up to the first end token, included."""
        ends = (index for index, token in enumerate(tokens) if token in self.ids)
        return tokens[: next(ends, len(tokens)) + 1]


def end_tokens(model: Any, tokenizer: Any) -> EndTokens:
    """The tokenizer's EOS, and the end tokens in the model's generation_config.

    The assets stage writes all end tokens of the base model there (stages/assets/base_model.py).
    """
    return EndTokens.of(model.generation_config, tokenizer)


def saved_end_tokens(folder: Path, tokenizer: Any) -> EndTokens:
    """`end_tokens` of a model's folder, without its weights."""
    from transformers import GenerationConfig  # takes a second to import

    config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return EndTokens.of(config, tokenizer)
