"""A reward model over HTTP: OpenRLHF's protocol, with more keys (docs/ppo.md)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from stages.lib.core.errors import RewardsFailed
from stages.lib.core.types import Prompt
from stages.ppo.common.reward_results import (
    RewardInputs,
    RewardResult,
    all_failed,
    read_results,
)

TRIES, TIMEOUT_SECONDS, BACKOFF_SECONDS = 5, 180.0, 1.0  # as in OpenRLHF
RETRIED = (429, 500, 502, 503, 504)


def retrying_session() -> requests.Session:
    """A session that sends a request up to TRIES times, and waits twice as long each time."""
    session = requests.Session()
    retry = Retry(
        total=TRIES - 1,
        backoff_factor=BACKOFF_SECONDS,
        allowed_methods=["POST"],
        status_forcelist=RETRIED,
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


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
    session: requests.Session = field(default_factory=retrying_session)

    def __call__(self, inputs: RewardInputs) -> list[RewardResult]:
        """
        Raises:
            RewardsFailed: another model than at the start is behind the address.
        """
        request = self.request(inputs)
        try:
            response = self.session.post(self.url, json=request, timeout=TIMEOUT_SECONDS)
            response.raise_for_status()
            reply = response.json()
        except requests.RequestException as error:  # also of a reply that is not JSON
            return all_failed(len(inputs.texts), f"{self.url}, {TRIES} tries at most: {error}")
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
                f"ppo.rewards {self.name}: {self.url} started with the model "
                f"{self.models[0] or '(none stated)'}, and now states {model or '(none)'}. "
                "Start the first one again and run the stage again, which resumes from its last "
                "update; or delete .rondo/work/<round>/ppo to start anew with the other"
            )
