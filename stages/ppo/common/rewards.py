"""Further rewards beside the reward stage's model (`ppo.rewards`): other reward models, Python
functions, reward models over HTTP.

Each gives one number per response. PPO's score is the weighted sum of all rewards; each is also
logged under its name. The reward stage's model itself is among them, as SERVED, if it is served
(`ppo.reward_url`).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from stages.lib.core.files import ASSETS
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams, RewardSource
from stages.lib.core.progress import tracked
from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import Prompt, StateDict
from stages.lib.core.user_functions import import_function
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.lib.lm import world
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.common.reward_functions import FunctionReward
from stages.ppo.common.reward_results import (
    SERVED,
    RewardFunction,
    RewardInputs,
    RewardResult,
    RewardResults,
    read_results,
)
from stages.ppo.common.reward_server import RewardServer


@dataclass(frozen=True)
class Rewards:
    """The reward functions and their weights, by name."""

    sources: Mapping[str, RewardFunction] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, inputs: RewardInputs) -> RewardResults:
        """The results of all rewards; raises what the function from `start` raises."""
        return self.start(inputs)()

    def start(self, inputs: RewardInputs) -> Callable[[], RewardResults]:
        """Send the requests to servers, which work while the caller runs its models.

        Returns:
            A function that waits for the servers, runs functions and models, and returns all
            results; the main process does this for all. It raises RewardsFailed if another model
            than at the start is behind a server's address.
        """
        # Functions stay in this thread: their time limits may need signals, which only the main
        # thread gets.
        replies = {
            name: in_thread(partial(source, inputs))
            for name, source in self.sources.items()
            if isinstance(source, RewardServer) and world.is_main()
        }

        def results() -> RewardResults:
            sources = self.sources.items()
            by_name = {
                name: replies[name].result() if name in replies else source(inputs)
                for name, source in tracked("further rewards", sources, len(sources), "rewards")
            }
            return RewardResults(len(inputs.texts), by_name)

        return partial(world.in_main, results)

    def check_columns(self, rows: Sequence[TrainingPrompt]) -> None:
        """
        Raises:
            BadInput: a function requires a column that no training prompt has.
        """
        columns = {name for row in rows for name in row.get("columns", {})}
        for source in self.sources.values():
            if isinstance(source, FunctionReward):
                source.check_columns(columns)

    def combine(
        self,
        ppo: PpoParams,
        calibrated: Tensor,
        parts: dict[str, list[float]],
        ended: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """The scores that the policy is trained on, of B responses none of whose rewards failed.

        Args:
            ppo: weights, clip range and penalties.
            calibrated: (B,) calibrated scores of the reward stage's model.
            parts: (B,) scores of the further rewards, by name.
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

    def expect_model(self, name: str, model: str) -> None:
        """Refuse all replies of a server that state another model."""
        source = self.sources[name]
        assert isinstance(source, RewardServer)
        source.models = [model]

    def state(self) -> StateDict:
        """The models that the servers stated, by the name of the reward, for `load_state`."""
        return {
            name: list(source.models)
            for name, source in self.sources.items()
            if isinstance(source, RewardServer)
        }

    def load_state(self, state: StateDict) -> None:
        for name, source in self.sources.items():
            if isinstance(source, RewardServer):
                source.models = list(state[name])


def in_thread(function: Callable[[], list[RewardResult]]) -> "Future[list[RewardResult]]":
    """Call a function in a thread of its own; the future has its result or its exception."""
    future: Future[list[RewardResult]] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        # raised where the result is read
        except BaseException as error:
            future.set_exception(error)

    # a daemon, so that a failed run does not wait for the tries of its last request
    Thread(target=run, daemon=True).start()
    return future


def load_rewards(params: Params) -> Rewards:
    """The rewards of `ppo.rewards` and `ppo.reward_url`."""
    sources, served = params.ppo.rewards, params.ppo.reward_url
    by_name = {source.name: load(source, params) for source in sources}
    if served:
        by_name[SERVED] = load_server(SERVED, f"{served.rstrip('/')}/get_reward", params)
    return Rewards(by_name, {source.name: source.weight for source in sources})


def load(source: RewardSource, params: Params) -> RewardFunction:
    """The function, model or server of one reward."""
    if source.function:
        key = f"ppo.rewards {source.name}"
        return FunctionReward(import_function(source.function, key), key)
    if source.model:
        return ModelReward(Path(source.model), params)
    return load_server(source.name, str(source.url), params)


def load_server(name: str, url: str, params: Params) -> RewardServer:
    tokenizer = load_tokenizer(ASSETS / "model")

    # the server gets rendered texts, in the template of the base model
    def render(prompt: Prompt) -> str:
        rendered = render_prompt(tokenizer, prompt, params.prepare.prompt_format)
        return text_with_bos(tokenizer, rendered)

    return RewardServer(name, url, render)


class ModelReward:
    """Scores by a reward model with its own tokenizer; calibrated if its config has a calibration
    (`mean`, `std`).
    """

    def __init__(self, folder: Path, params: Params) -> None:
        self.scorer = RewardScorer(folder, load_tokenizer(folder), params)

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        return read_results(self.scores(inputs.prompts, inputs.texts), len(inputs.texts))

    def scores(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        scorer = self.scorer
        if hasattr(scorer.model.config, "mean"):
            return scorer(prompts, texts)
        raw: list[float] = scorer.raw(scorer.encode(prompts, texts)).tolist()
        return raw


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
