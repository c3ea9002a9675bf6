"""Further rewards beside the reward stage's model (`ppo.rewards`): other reward models, Python
functions, reward models over HTTP (OpenRLHF's protocol, with more keys: docs/ppo.md,
docs/serving.md).

Each gives one number per response. PPO's score is the weighted sum of all rewards; each is also
logged under its name. The reward stage's model itself is among them if it is served
(`ppo.reward_url`), or has a tokenizer of its own.

A reward that failed is never a number: its episode is left out of the update and counted. If more
than `ppo.max_failed_rewards` of the episodes failed, the run stops.
"""

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from threading import Thread
from typing import Any

import requests
import torch
from torch import Tensor

from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RewardsFailed, Unreachable
from stages.lib.core.files import ASSETS, file_hash
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PpoParams, RewardSource
from stages.lib.core.progress import tracked
from stages.lib.core.reading import parse_json
from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import Prompt, StateDict
from stages.lib.core.user_functions import import_function, is_finite
from stages.lib.data.prompts import render_prompt, text_with_bos
from stages.lib.lm import world
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.responses import Response
from stages.lib.lm.scoring import RewardScorer, is_calibrated

# The names of the reward stage's model among the rewards: if it is served, and if it has a
# tokenizer of its own, so that it reads texts
SERVED, READS_TEXTS = "ppo.reward_url", "reward.model"
REASON_CHARACTERS = 300
COMPLETIONS = "completions"  # TRL's name for responses
TOKEN = "RONDO_REWARD_TOKEN"  # the environment variable that `rondo serve-reward` reads, too
TIMEOUT_SECONDS = 180.0  # as in OpenRLHF


@dataclass(frozen=True)
class RewardInputs:
    """B sampled responses, as the rewards read them."""

    rows: Sequence[TrainingPrompt]  # of the prompts
    responses: Sequence[Response]

    def select(self, episodes: Sequence[int]) -> "RewardInputs":
        """Some of the responses, by index."""
        return RewardInputs([self.rows[i] for i in episodes], [self.responses[i] for i in episodes])

    @property
    def prompts(self) -> list[Prompt]:
        return [row["prompt"] for row in self.rows]

    @property
    def texts(self) -> list[str]:
        return [response.text for response in self.responses]

    @property
    def lengths(self) -> list[int]:
        """Tokens per response."""
        return [len(response.tokens) for response in self.responses]

    @property
    def ended(self) -> list[bool]:
        """Whether an end token was sampled."""
        return [response.ended for response in self.responses]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The further columns of the rows (`prepare.columns`); None where a row has no value."""
        by_row = [row.get("columns", {}) for row in self.rows]
        names = dict.fromkeys(name for columns in by_row for name in columns)
        return {name: [columns.get(name) for columns in by_row] for name in names}

    @property
    def finish_reasons(self) -> list[str]:
        """`stop` if EOS was sampled, else `length`."""
        return ["stop" if ended else "length" for ended in self.ended]

    @property
    def arguments(self) -> dict[str, list[Any]]:
        """What a function can have beside prompts and responses, one value per response."""
        return self.columns | {
            "finish_reasons": self.finish_reasons,
            "token_counts": self.lengths,
        }


@dataclass(frozen=True)
class FailedReward:
    """In place of a reward that could not be computed."""

    reason: str


RewardResult = float | FailedReward
RewardFunction = Callable[[RewardInputs], Sequence[RewardResult]]


def settings_key(name: str) -> str:
    """Where params.yaml has a reward, for errors."""
    return name if name in (SERVED, READS_TEXTS) else f"ppo.rewards {name}"


def all_failed(number: int, reason: str) -> list[RewardResult]:
    """`number` times the same failure."""
    return [FailedReward(reason[:REASON_CHARACTERS])] * number


def read_results(values: Any, number: int) -> list[RewardResult]:
    """What a function or a server returned for `number` responses.

    A value that is not a finite number is a failure of its response. With another number of values
    all fail, because nobody knows which value belongs to which response.

    Example:
        >>> read_results([1, None], 2)
        [1.0, FailedReward(reason='returned None, not a finite number')]
    """
    try:
        values = list(values)
    except TypeError:
        return all_failed(number, f"returned {values!r:.100}, not a list of numbers")
    if len(values) != number:
        return all_failed(number, f"returned {len(values)} rewards for {number} responses")
    return [
        float(value)
        if isinstance(value, Real) and is_finite(value)
        else FailedReward(f"returned {value!r:.100}, not a finite number")
        for value in values
    ]


@dataclass(frozen=True)
class RewardResults:
    """The results of all further rewards for `number` responses, by the name of the reward."""

    number: int
    by_name: Mapping[str, Sequence[RewardResult]]

    @property
    def kept(self) -> list[int]:
        """The responses of which no reward failed, by index."""
        return [
            index
            for index in range(self.number)
            if not any(isinstance(part[index], FailedReward) for part in self.by_name.values())
        ]

    @property
    def failed_share(self) -> float:
        """Share of the responses with a failed reward."""
        return 1 - len(self.kept) / self.number

    @property
    def parts(self) -> dict[str, list[float]]:
        """The numbers of the `kept` responses, by the name of the reward."""
        kept = self.kept
        return {
            name: [float(part[index]) for index in kept]  # type: ignore[arg-type]
            for name, part in self.by_name.items()
        }

    @property
    def failures(self) -> list[str]:
        """One line per reward and reason, the most frequent first."""
        counts = Counter(
            f"{settings_key(name)}: {result.reason}"
            for name, part in self.by_name.items()
            for result in part
            if isinstance(result, FailedReward)
        )
        return [
            f"{count} of {self.number} rewards failed, {reason}"
            for reason, count in counts.most_common()
        ]

    def check_share(self, max_share: float) -> None:
        """
        Raises:
            RewardsFailed: rewards of more than `max_share` of the responses failed, or of all.
        """
        if self.failed_share > max_share or not self.kept:
            raise RewardsFailed(
                f"rewards of {self.failed_share:.0%} of the responses failed; "
                f"ppo.max_failed_rewards is {max_share}. {'; '.join(self.failures[:5])}. "
                "Repair the reward and run the stage again, which resumes from its last update"
            )


class FunctionReward:
    """Scores by the user's own function.

    A function with a parameter `completions` gets all arguments by keyword, as from TRL's
    GRPOTrainer. Of any other the first two arguments are prompts and responses. Further parameters
    get, by their names, the values of `RewardInputs.arguments`; `**columns` gets all of them that
    no other parameter has.

    Args:
        function: returns one number per response; None: this reward failed.
        key: where params.yaml names it, for error messages.

    Example:
        >>> def equal(prompts, responses, answer):
        ...     return [float(r == a) for r, a in zip(responses, answer, strict=True)]
        >>> row = {"id": "1", "prompt": "2 + 2 =", "columns": {"answer": " 4"}}
        >>> response = Response([5], [6, 2], " 4", ended=True)
        >>> FunctionReward(equal, "key")(RewardInputs([row], [response]))
        [1.0]
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.function, self.key = function, key
        try:
            parameters = dict(inspect.signature(function).parameters)
        except ValueError:  # of some compiled functions nobody knows the parameters
            parameters = {}
        self.by_keyword = COMPLETIONS in parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
        self.positional = [] if self.by_keyword else names[:2]
        self.names = names[len(self.positional) :]
        self.required = {
            name for name in self.names if parameters[name].default is inspect.Parameter.empty
        }

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        number = len(inputs.texts)
        try:
            return read_results(self.call(inputs), number)
        # the user's code may raise anything
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            line = f"({frame.filename}, line {frame.lineno})"
            return all_failed(number, f"{type(error).__name__}: {error} {line}")

    def call(self, inputs: RewardInputs) -> Any:
        arguments = inputs.arguments
        if self.by_keyword:
            arguments |= {"prompts": inputs.prompts, COMPLETIONS: inputs.texts}
        keywords = self.chosen(arguments)
        # a batch may consist of reported prompts only, which have no columns
        keywords |= {name: [None] * len(inputs.texts) for name in self.required - keywords.keys()}
        if self.by_keyword:
            return self.function(**keywords)
        return self.function(inputs.prompts, inputs.texts, **keywords)

    def chosen(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that the function takes."""
        return {
            name: values
            for name, values in arguments.items()
            if name in self.names or (self.takes_all and name not in self.positional)
        }

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the prompts have every column that the function requires.

        Raises:
            BadInput: names the function's key and the columns that are missing.
        """
        given = {*columns, "prompts", COMPLETIONS, *RewardInputs([], []).arguments}
        if missing := sorted(self.required - given):
            raise BadInput(
                f"{self.key}: its function requires {', '.join(missing)}, which no training prompt "
                "has: add the columns to prepare.columns, or give the parameters a default"
            )


@dataclass
class RewardServer:
    """Rewards by the server at an address.

    Attributes:
        models: what the server's first reply stated as its `model` (None: nothing); empty before
            the first reply.
    """

    name: str
    url: str
    render: Callable[[Prompt], str]
    models: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = http_session.retrying_session(self.url, TOKEN)

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        """
        Raises:
            RewardsFailed: another model than at the start is behind the address.
        """
        request = self.request(inputs)
        try:
            response = self.session.post(
                self.url, json=request, timeout=TIMEOUT_SECONDS, stream=True
            )
            content = http_session.read_body(response, TIMEOUT_SECONDS)
            response.raise_for_status()
            # not `response.json()`: it refuses NaN if the package simplejson is installed
            reply = parse_json(content)
        except (requests.RequestException, ValueError) as error:
            reason = f"{self.url}, {http_session.TRIES} tries at most: {error}"
            if isinstance(error, requests.HTTPError):  # the server's own words
                reason += f": {content[:200].decode(errors='replace')}"
            return all_failed(len(inputs.texts), reason)
        if not isinstance(reply, dict) or "rewards" not in reply:
            return all_failed(len(inputs.texts), f"{self.url}: the reply has no key `rewards`")
        self.check_model(reply.get("model"))
        ids = reply.get("ids", request["ids"])
        if ids != request["ids"]:
            return all_failed(
                len(inputs.texts),
                f"{self.url}: sent ids {request['ids']!r:.80}, but the reply has {ids!r:.80}",
            )
        return read_results(reply["rewards"], len(inputs.texts))

    def request(self, inputs: RewardInputs) -> dict[str, Any]:
        """The body of a request; an id is unique within it."""
        prompts, columns = [self.render(prompt) for prompt in inputs.prompts], inputs.columns
        return {
            "query": [prompt + text for prompt, text in zip(prompts, inputs.texts, strict=True)],
            "prompts": prompts,
            "labels": columns.get("label", [None] * len(prompts)),
            "ids": [f"{row['id']}#{index}" for index, row in enumerate(inputs.rows)],
            "columns": columns,
            "finish_reasons": inputs.finish_reasons,
            "token_counts": inputs.lengths,
        }

    def check_model(self, model: Any) -> None:
        """Remember the model that the first reply stated, and compare it with that of this one."""
        if not self.models:
            self.models.append(model)
        if model != self.models[0]:
            raise RewardsFailed(
                f"{settings_key(self.name)}: {self.url} started with the model "
                f"{self.models[0] or '(none stated)'}, and now states {model or '(none)'}. "
                "Start the first one again and run the stage again, which resumes from its last "
                "update; or delete .rondo/work/<round>/ppo to start anew with the other"
            )


def check_served_model(url: str, folder: Path) -> str:
    """Check that `rondo serve-reward` has the reward model of this round.

    Returns:
        What each of its replies has to state as the model.

    Raises:
        BadInput: it has another one.
        Unreachable: it does not answer.
    """
    try:
        response = http_session.retrying_session(url, TOKEN).get(
            f"{url.rstrip('/')}/health", timeout=TIMEOUT_SECONDS, stream=True
        )
        content = http_session.read_body(response, TIMEOUT_SECONDS)
        response.raise_for_status()
        health = parse_json(content)
        served, model = health["sha256"], str(health["model"])
    except (requests.RequestException, ValueError, TypeError, KeyError) as error:
        raise Unreachable(
            f"ppo.reward_url {url}: no answer of `rondo serve-reward` there: {error!r:.300}; "
            "start it there, or set ppo.reward_url to null"
        ) from None
    if served != file_hash(folder):
        raise BadInput(
            f"ppo.reward_url {url} serves another model (sha256 {served}) than {folder} "
            f"({file_hash(folder)}): start `rondo serve-reward` for this round"
        )
    return model


@dataclass(frozen=True)
class Rewards:
    """The reward functions and their weights, by name."""

    sources: Mapping[str, RewardFunction] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

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
            calibrated: (B,) calibrated scores of the reward stage's model; without one, anything
                finite, since its weight is 0.
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

    def weighted_sum(self, parts: Mapping[str, Sequence[float]]) -> Tensor:
        """(B,) the score without a reward model: that of the further rewards together."""
        columns = [self.weights[name] * torch.tensor(scores) for name, scores in parts.items()]
        return torch.stack(columns).sum(0)

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


def load_rewards(params: Params, by_text: Path | None = None) -> Rewards:
    """The rewards of `ppo.rewards` and `ppo.reward_url`.

    by_text: folder of the reward stage's model if it reads other tokens than the policy; else None.
    """
    sources, served = params.ppo.rewards, params.ppo.reward_url
    by_name = {source.name: load(source, params) for source in sources}
    if served:
        by_name[SERVED] = load_server(SERVED, f"{served.rstrip('/')}/get_reward", params)
    elif by_text:
        by_name[READS_TEXTS] = ModelReward(by_text, params)
    return Rewards(by_name, {source.name: source.weight for source in sources})


def load(source: RewardSource, params: Params) -> RewardFunction:
    """The function, model or server of one reward."""
    key = settings_key(source.name)
    if source.function:
        return FunctionReward(import_function(source.function, key), key)
    if source.model:
        return ModelReward(model_folder(source.model, key), params)
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
        self.scorer = RewardScorer(folder, params)

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        return read_results(self.scores(inputs.prompts, inputs.texts), len(inputs.texts))

    def scores(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        scorer = self.scorer
        if is_calibrated(scorer.model):
            return scorer(prompts, texts)
        raw: list[float] = scorer.raw(scorer.encode(prompts, texts)).tolist()
        return raw


def of_stage(parts: dict[str, list[float]]) -> list[float] | None:
    """Take the scores of the reward stage's model out of `parts`, if they are among them."""
    return parts.pop(SERVED, None) or parts.pop(READS_TEXTS, None)


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
