"""A saved reward model that scores prompts with responses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.files import Row
from stages.lib.core.params import Params
from stages.lib.data.prompts import Prompt, encode
from stages.lib.lm.generation import own_scores, reward_scores
from stages.lib.lm.loading import calibrated, load_reward_model, members
from stages.lib.lm.packing import Tokens

Score = Callable[[Sequence[Prompt], Sequence[str]], list[float]]

ENDING_TOKENS = 16  # room for an ending, so that max_length does not cut it off again


class Scorer:
    """Calibrated scores of whole responses (with EOS) under a reward model."""

    def __init__(self, path: Path, tokenizer: Any, params: Params, batch_size: int) -> None:
        self.model, self.tokenizer, self.params = (
            load_reward_model(path, params.model),
            tokenizer,
            params,
        )
        self.batch_size = batch_size

    def raw(self, sequences: Sequence[Tokens]) -> Tensor:
        return reward_scores(self.model, sequences, batch_size=self.batch_size)

    def tokens(self, sequences: Sequence[Tokens]) -> list[float]:
        scores: list[float] = calibrated(self.raw(sequences), self.model).tolist()
        return scores

    def apart(self, sequences: Sequence[Tokens]) -> Tensor:
        """(K, B) calibrated scores of each of K members of an ensemble."""
        each = (
            calibrated(own_scores(m, sequences, batch_size=self.batch_size), m)
            for m in members(self.model)
        )
        return torch.stack(list(each))

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Tokens]:
        encoded = (
            encode(self.tokenizer, p, r, self.params.prepare.prompt_format)
            for p, r in zip(prompts, responses, strict=True)
        )
        return [prompt + response for prompt, response in encoded]

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return self.tokens(self.encode(prompts, responses))


def short(pairs: list[Row], tokenizer: Any, params: Params) -> list[Row]:
    """Pairs that stay within reward.max_length with an ending appended."""

    def tokens(row: Row, side: str) -> int:
        prompt, response = encode(tokenizer, row["prompt"], row[side], params.prepare.prompt_format)
        return len(prompt) + len(response)

    return [
        row
        for row in pairs
        if max(tokens(row, "chosen"), tokens(row, "rejected")) + ENDING_TOKENS
        <= params.reward.max_length
    ]
