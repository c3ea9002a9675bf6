"""The fluency judge: is a text garbled, by its negative log-likelihood under the base model?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.rows import Demonstration
from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.data.prompts import encode
from stages.lib.lm.logprobs import token_logprobs

FLUENT = 0.95  # quantile of human texts up to which a text counts as fluent


class Fluency:
    """Negative log-likelihood of each response, nats per token with EOS, under a model.

    Args:
        model: a model that PPO did not train.
        tokenizer: its tokenizer.
        prompt_format: how prompts become text.
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


def garbledness(nll: ScoreFunction, people: Sequence[Demonstration]) -> ScoreFunction:
    """Make a function that scores how far a text is less fluent than human texts.

    All fluent texts have the score 0, so that bland texts are not preferred.

    Args:
        nll: negative log-likelihood per response, nats per token.
        people: human demonstrations, with `prompt` and `completion`.

    Returns:
        A function (prompts, responses) -> scores of at most 0, nats per token.
    """
    human_nlls = nll([row["prompt"] for row in people], [row["completion"] for row in people])
    threshold = float(np.quantile(human_nlls, FLUENT))

    def scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return [min(0.0, threshold - value) for value in nll(prompts, responses)]

    return scores
