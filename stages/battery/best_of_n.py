"""What the SFT model says, N times a prompt, with the reward model's scores and the judge's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.battery.metrics import best_of_n
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import encode
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.packing import append_eos
from stages.lib.lm.reward_ensemble import ensemble_members
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.sentiment import sentiment
from stages.lib.metrics.stats import paired_bootstrap


@dataclass(frozen=True)
class ScoredSamples:
    """P prompts; P x N texts, their calibrated scores and judged sentiments, those of one prompt
    beside each other.

    disagreement: the standard deviation of a text's calibrated score over the members of an
    ensemble, in the mean.
    """

    prompts: list[Prompt]
    texts: list[str]
    scores: list[float]
    sentiment: list[float]
    disagreement: float | None = None

    def by_prompt(self) -> list[range]:
        """For each prompt the places of its texts."""
        each = len(self.texts) // len(self.prompts)
        return [range(place, place + each) for place in range(0, len(self.texts), each)]

    def best_of(self, n: int, values: Sequence[float]) -> list[float]:
        """For each prompt the expected value of the answer that the reward model picks of n."""
        return [
            best_of_n([self.scores[i] for i in places], [values[i] for i in places], n)
            for places in self.by_prompt()
        ]


def sample_and_score(
    model: Any, scorer: RewardScorer, rows: list[Row], each: int, params: Params
) -> ScoredSamples:
    """Sampled and scored as PPO does: the tokens themselves, closed by EOS."""
    prompts = [row["prompt"] for row in rows]
    asked = [prompt for prompt in prompts for _ in range(each)]
    ids = [
        encode(scorer.tokenizer, prompt, None, params.prepare.prompt_format)[0] for prompt in asked
    ]
    generator = torch.Generator().manual_seed(params.seed)
    responses = sample_responses(
        model, scorer.tokenizer, ids, params.ppo, generator, scorer.batch_size
    )
    ended = append_eos(responses, scorer.tokenizer.eos_token_id)
    texts = scorer.tokenizer.batch_decode(responses, skip_special_tokens=True)
    whole = [prompt + response for prompt, response in zip(ids, ended, strict=True)]
    disagreement = (
        float(scorer.scores_per_member(whole).std(0).mean())
        if len(ensemble_members(scorer.model)) > 1
        else None
    )
    return ScoredSamples(
        prompts, texts, scorer.tokens(whole), sentiment(asked, texts), disagreement
    )


def best_of_n_curve(answers: ScoredSamples, params: Params) -> dict[str, Any]:
    """Best-of-n of each size: mean judged sentiment and score; `rise`: of the largest n over one
    answer, with its interval over prompts.
    """
    values = {"sentiment": answers.sentiment, "score": answers.scores}
    sizes = params.battery.best_of
    one, most = (
        answers.best_of(1, answers.sentiment),
        answers.best_of(max(sizes), answers.sentiment),
    )
    rises = [[b - a] for a, b in zip(one, most, strict=True)]
    rise, low, high = paired_bootstrap(rises, params.evaluate.bootstrap_resamples, params.seed)
    means = {
        str(n): {name: _mean(answers.best_of(n, column)) for name, column in values.items()}
        for n in sizes
    }
    return means | {"rise": rise, "rise_low": low, "rise_high": high}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
