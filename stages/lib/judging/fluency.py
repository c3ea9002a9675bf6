"""Is a text garbled: its negative log-likelihood under the base model, against that of human texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Prompt, Row, ScoreFunction
from stages.lib.data.prompts import encode
from stages.lib.lm.logprobs import token_logprobs

FLUENCY = "fluency"
FLUENT = 0.95  # quantile of people's texts up to which a text counts as fluent


class Fluency:
    """Negative log-likelihood of each response, nats a token with its EOS, under a reference model
    that was not trained by PPO.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_format: PromptFormat) -> None:
        self.model, self.tokenizer, self.prompt_format = model, tokenizer, prompt_format

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        encoded = [
            encode(self.tokenizer, p, r, self.prompt_format)
            for p, r in zip(prompts, responses, strict=True)
        ]
        logprobs = token_logprobs(self.model, [p for p, _ in encoded], [r for _, r in encoded])
        return [-float(row.mean()) for row in logprobs]


def garbledness(nll: ScoreFunction, people: Sequence[Row]) -> ScoreFunction:
    """How far a text is beyond what people write, nats a token below 0; 0 for any that is not:
    bland texts are no better than others.
    """
    usual = float(
        np.quantile(
            nll([row["prompt"] for row in people], [row["completion"] for row in people]), FLUENT
        )
    )

    def number(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return [min(0.0, usual - each) for each in nll(prompts, responses)]

    return number
