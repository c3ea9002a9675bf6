"""Judges that score each response alone and compare the scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.lib.core.params.evaluation import ZeroShotParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.progress import progress
from stages.lib.core.rows import Demonstration
from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.core.user_functions import check_scores
from stages.lib.data.prompts import continuing_tokens, encode, whole_texts, with_bos
from stages.lib.judging.pairwise import PREFERENCE_BY_OUTCOME, Comparison, LocalJudge, Verdict
from stages.lib.lm.logprobs import token_logprobs


class PointwiseJudge(LocalJudge):
    """Prefers the response with the higher score.

    Args:
        name: the judge's name.
        score: (prompts, responses) -> one score per response.
        margin: differences up to this are ties.
    """

    def __init__(self, name: str, score: ScoreFunction, margin: float) -> None:
        super().__init__(name)
        self.score, self.margin = score, margin
        self.known: dict[tuple[str, str], float] = {}  # scores by (prompt, response)

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """Compare scores; each response is scored once, also if it is in several comparisons.

        Raises:
            RondoError: the function did not return one finite number per response.
        """
        prompts = [comparison.prompt for comparison in comparisons]
        texts = [row.a for row in comparisons] + [row.b for row in comparisons]
        scores = self.scores([*prompts, *prompts], texts)
        sides = zip(scores[: len(prompts)], scores[len(prompts) :], strict=True)
        return [
            Verdict(PREFERENCE_BY_OUTCOME[0.5 if abs(a - b) <= self.margin else float(a > b)])
            for a, b in sides
        ]

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """The score of each response; a response that was scored before is not scored again.

        Raises:
            RondoError: the function did not return one finite number per response.
        """
        keys = [(str(prompt), text) for prompt, text in zip(prompts, responses, strict=True)]
        new = {
            key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.known
        }
        texts = [text for _, text in new]
        with progress(f"judge {self.name}"):
            scores = self.score(list(new.values()), texts) if texts else []
        check_scores(scores, len(texts), f"judge {self.name}")
        self.known |= dict(zip(new, scores, strict=True))
        return [self.known[key] for key in keys]


FLUENT = 0.95  # quantile of human texts up to which a text counts as fluent


class Fluency:
    """Negative log-likelihood of each response, nats per token with EOS, under a model that
    PPO did not train.
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


class ZeroShot:
    """Log odds of the better of two answers to a question about each text, in nats, under a model
    that was trained neither on labels nor on rewards.
    """

    def __init__(self, model: Any, tokenizer: Any, params: ZeroShotParams) -> None:
        self.model, self.tokenizer, self.params = model, tokenizer, params

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        texts = [
            with_bos(self.tokenizer, self.tokenizer(text, add_special_tokens=False).input_ids)
            for text in (whole + self.params.question for whole in whole_texts(prompts, responses))
        ]
        better_ids, worse_ids = (
            continuing_tokens(self.tokenizer, answer)
            for answer in (self.params.better, self.params.worse)
        )
        answers = [better_ids] * len(texts) + [worse_ids] * len(texts)
        logprobs = [float(row.sum()) for row in token_logprobs(self.model, texts + texts, answers)]
        pairs = zip(logprobs[: len(texts)], logprobs[len(texts) :], strict=True)
        return [better - worse for better, worse in pairs]


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
