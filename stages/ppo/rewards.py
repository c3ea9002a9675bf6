"""Rewards beside the reward stage's model: other reward models, Python functions, reward models over HTTP (`ppo.rewards`).

Each gives one number a response; the score of PPO is their weighted sum, and each is logged by its name.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from stages.errors import BadInput, RondoError
from stages.generation import reward_scores
from stages.models import calibrated, load_reward_model, load_tokenizer
from stages.params import Params, RewardSource
from stages.prompts import Prompt, encode, render_prompt

Reward = Callable[[Sequence[Prompt], Sequence[str]], list[float]]
TRIES, TIMEOUT_SECONDS = 5, 180  # as OpenRLHF has them


class Rewards:
    """The sources of `ppo.rewards`, loaded; none without params."""

    def __init__(self, params: Params | None = None) -> None:
        self.sources = params.ppo.rewards if params else []
        self.rewards = [load(source, params) for source in self.sources] if params else []

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> dict[str, list[float]]:
        """Scores by the source's name.

        Raises:
            RondoError: a source does not answer with one finite number a response.
        """
        told = {source.name: reward(prompts, responses) for source, reward in zip(self.sources, self.rewards, strict=True)}
        for name, scores in told.items():
            if len(scores) != len(responses) or not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
                raise RondoError(
                    f"ppo.rewards {name}: one finite number for each of {len(responses)} responses wanted, got {scores!r:.200}"
                )
        return told

    @property
    def weights(self) -> dict[str, float]:
        return {source.name: source.weight for source in self.sources}


def load(source: RewardSource, params: Params) -> Reward:
    if source.function:
        return load_function(source)
    return model_reward(Path(source.model), params) if source.model else remote_reward(source, params)


def load_function(source: RewardSource) -> Reward:
    """
    Raises:
        BadInput: there is no such module, or no such function in it.
    """
    module, _, name = (source.function or "").partition(":")
    try:
        reward: Reward = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"ppo.rewards {source.name}: {source.function} cannot be imported ({error}); put the module in the project's folder"
        ) from None
    return reward


def model_reward(folder: Path, params: Params) -> Reward:
    """Scores by a reward model of its own tokenizer, in standard deviations of its demonstrations where its config has them."""
    model, tokenizer = load_reward_model(folder, params.model), load_tokenizer(folder)

    def reward(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        encoded = (encode(tokenizer, p, r, params.prepare.prompt_format) for p, r in zip(prompts, responses, strict=True))
        size, pad = params.ppo.micro_batch_size, tokenizer.pad_token_id
        raw = reward_scores(model, [prompt + response for prompt, response in encoded], batch_size=size, pad_token_id=pad)
        scores: list[float] = (calibrated(raw, model) if hasattr(model.config, "mean") else raw).tolist()
        return scores

    return reward


def remote_reward(source: RewardSource, params: Params) -> Reward:
    """OpenRLHF's protocol: POST {query: whole texts, prompts, labels} gives {rewards: [...]}.

    Raises, when called:
        RondoError: no answer after TRIES tries; the run's state is kept.
    """
    session, tokenizer = requests.Session(), load_tokenizer(Path("assets/model"))
    retry = Retry(total=TRIES - 1, backoff_factor=1, allowed_methods=["POST"], status_forcelist=[429, 500, 502, 503, 504])
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    url = str(source.url)

    def reward(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        rendered = [render_prompt(tokenizer, prompt, params.prepare.prompt_format) for prompt in prompts]
        query = [prompt + response for prompt, response in zip(rendered, responses, strict=True)]
        try:
            answer = session.post(url, json={"query": query, "prompts": rendered, "labels": [None] * len(query)}, timeout=TIMEOUT_SECONDS)
            answer.raise_for_status()
            return [float(score) for score in answer.json()["rewards"]]
        except (requests.RequestException, KeyError, TypeError, ValueError) as error:
            raise RondoError(
                f"ppo.rewards {source.name}: {url} gave no rewards after {TRIES} tries ({error}); start it and run the stage again, "
                "which goes on from its last update"
            ) from None

    return reward


def files(params: Params) -> list[Path]:
    """What the further rewards are made of, as far as it lies on this disk."""
    folders = [Path(source.model) for source in params.ppo.rewards if source.model]
    functions = [load_function(source) for source in params.ppo.rewards if source.function]
    return folders + [Path(file) for function in functions if (file := inspect.getsourcefile(function))]
