"""A reward model over HTTP: OpenRLHF's protocol, with more keys (docs/ppo.md, docs/serving.md)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from stages.lib.core import http_session
from stages.lib.core.errors import BadInput, RewardsFailed, Unreachable
from stages.lib.core.files import file_hash
from stages.lib.core.reading import parse_json
from stages.lib.core.types import Prompt
from stages.ppo.common.reward_results import (
    RewardInputs,
    RewardResult,
    all_failed,
    read_results,
    settings_key,
)

TOKEN = "RONDO_REWARD_TOKEN"  # the environment variable that `rondo serve-reward` reads, too
TIMEOUT_SECONDS = 180.0  # as in OpenRLHF


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
            "token_counts": list(inputs.lengths),
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
