"""Further rewards beside the reward stage's model (`ppo.rewards`): other reward models, Python
functions, reward models over HTTP.

Each gives one number per response. PPO's score is the weighted sum of all rewards; each is also
logged under its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3.util import Retry

from stages.lib.core.errors import RondoError
from stages.lib.core.files import ASSETS
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams, RewardSource
from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.core.user_functions import check_scores, import_function
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.scoring import RewardScorer

TRIES, TIMEOUT_SECONDS = 5, 180  # as in OpenRLHF


@dataclass(frozen=True)
class Rewards:
    """The reward functions and their weights, by name.

    Example:
        >>> rewards = Rewards({"length": lambda prompts, texts: [len(texts[0])]}, {"length": -0.1})
        >>> rewards(["The day"], [" ended."])
        {'length': [7]}
    """

    sources: Mapping[str, ScoreFunction] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str]
    ) -> dict[str, list[float]]:
        """Scores of the responses, by the name of the reward.

        Raises:
            RondoError: a reward does not return one finite number per response.
        """
        scores = {name: reward(prompts, responses) for name, reward in self.sources.items()}
        for name, numbers in scores.items():
            check_scores(numbers, len(responses), f"ppo.rewards {name}")
        return scores

    def combine(
        self,
        ppo: PpoParams,
        calibrated: Tensor,
        parts: dict[str, list[float]],
        ended: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """The scores that the policy is trained on.

        Args:
            ppo: weights, clip range and penalties.
            calibrated: (B,) calibrated scores of the reward stage's model.
            parts: what calling this object returned.
            ended: (B,) bool, an end token was sampled.
            lengths: (B,) tokens per response.

        Returns:
            (B,) weighted sums, clipped and penalised.
        """
        total = ppo.reward_weight * calibrated
        for name, scores in parts.items():
            total = total + self.weights[name] * torch.tensor(scores, device=total.device)
        return shape_scores(
            total,
            ended,
            lengths,
            clip=ppo.score_clip,
            missing_eos_penalty=ppo.missing_eos_penalty,
            length_penalty=ppo.length_penalty,
            free_length=ppo.free_length,
        )


def load_rewards(params: Params) -> Rewards:
    """The rewards of `ppo.rewards`."""
    sources = params.ppo.rewards
    return Rewards(
        {source.name: load(source, params) for source in sources},
        {source.name: source.weight for source in sources},
    )


def load(source: RewardSource, params: Params) -> ScoreFunction:
    """The function, model or server of one reward."""
    if source.function:
        return import_function(source.function, f"ppo.rewards {source.name}")
    if source.model:
        return model_reward(Path(source.model), params)
    return remote_reward(source, params)


def model_reward(folder: Path, params: Params) -> ScoreFunction:
    """Scores by a reward model with its own tokenizer; calibrated if its config has a calibration
    (`mean`, `std`).
    """
    scorer = RewardScorer(folder, load_tokenizer(folder), params)
    if hasattr(scorer.model.config, "mean"):
        return scorer
    return lambda prompts, responses: scorer.raw(scorer.encode(prompts, responses)).tolist()


def remote_reward(source: RewardSource, params: Params) -> ScoreFunction:
    """OpenRLHF's protocol: POST {query: whole texts, prompts, labels}, response {rewards: [...]}.

    The returned function raises:
        RondoError: no rewards after TRIES tries; the run can be resumed.
    """
    # the server gets rendered texts, in the template of the base model
    session, tokenizer = requests.Session(), load_tokenizer(ASSETS / "model")
    retry = Retry(
        total=TRIES - 1,
        backoff_factor=1,
        allowed_methods=["POST"],
        status_forcelist=[429, 500, 502, 503, 504],
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    url = str(source.url)

    def reward(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        rendered = [
            text_with_bos(tokenizer, render_prompt(tokenizer, prompt, params.prepare.prompt_format))
            for prompt in prompts
        ]
        query = [prompt + response for prompt, response in zip(rendered, responses, strict=True)]
        try:
            response = session.post(
                url,
                json={"query": query, "prompts": rendered, "labels": [None] * len(query)},
                timeout=TIMEOUT_SECONDS,
            )
            response.raise_for_status()
            return [float(score) for score in response.json()["rewards"]]
        except (requests.RequestException, KeyError, TypeError, ValueError) as error:
            raise RondoError(
                f"ppo.rewards {source.name}: {url} gave no rewards after {TRIES} tries ({error}); "
                "start it and run the stage again, which resumes from its last update"
            ) from None

    return reward


def shape_scores(
    scores: Tensor,
    ended: Tensor,
    lengths: Tensor,
    *,
    clip: float,
    missing_eos_penalty: float,
    length_penalty: float,
    free_length: int,
) -> Tensor:
    """(B,) scores clipped to +-clip, then less `missing_eos_penalty` if not `ended` (B,), and less
    `length_penalty` per token above `free_length`.
    """
    # clipped before the penalties, so that an extreme score cannot hide a missing EOS
    shaped = scores.clamp(-clip, clip) - missing_eos_penalty * (~ended)
    return shaped - length_penalty * (lengths - free_length).clamp(min=0)
