"""Requests and replies: OpenRLHF's `/get_reward` and vLLM's `/classify` (docs/serving.md).

Unknown keys are ignored, as engines send more of them with each version.
"""

import time
import uuid
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
    model_validator,
)
from scipy.special import expit

MAX_TEXTS = 1 << 14  # per request

Texts = Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_TEXTS)]
Sequences = Annotated[
    list[Annotated[list[StrictInt], Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXTS)
]


class RewardRequest(BaseModel):
    """OpenRLHF's request.

    query: rendered prompts with their responses. prompts: the rendered prompts. ids: of the
    requester; the reply repeats them.
    """

    query: Texts
    prompts: list[StrictStr | None] | None = None
    ids: list[StrictStr | StrictInt | None] | None = None

    @model_validator(mode="after")
    def _same_lengths(self) -> "RewardRequest":
        for name in ("prompts", "ids"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{name} has {len(values)} entries, query has {len(self.query)}")
        return self

    def reply(self, scores: list[float], model: str) -> dict[str, Any]:
        ids = {} if self.ids is None else {"ids": self.ids}
        return {"rewards": scores, "scores": scores, "extra_logs": {}, "model": model, **ids}


class ClassifyRequest(BaseModel):
    """vLLM's request, for a model with one class.

    input: texts; one text may stand alone. tokens: `input`, if that has the ids of tokens instead.
    use_activation (older clients: `activation`): as in vLLM, null means true, and the reply has the
    sigmoid of the score.
    """

    input: Annotated[Texts, BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] | None
    tokens: Sequences | None = None
    use_activation: bool | None = Field(
        None, validation_alias=AliasChoices("use_activation", "activation")
    )

    @model_validator(mode="before")
    @classmethod
    def _tokens_apart(cls, body: Any) -> Any:
        """So that an error names one kind of input, and not both."""
        match body:
            case {"input": [int(), *_] as one}:
                return body | {"input": None, "tokens": [one]}
            case {"input": [list(), *_] as tokens}:
                return body | {"input": None, "tokens": tokens}
            case {"input": texts}:
                return body | {"input": [] if texts is None else texts, "tokens": None}
        return body

    def reply(self, scores: list[float], model: str, tokens: int) -> dict[str, Any]:
        values = scores if self.use_activation is False else expit(scores).tolist()
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "label": "LABEL_0", "probs": [value], "num_classes": 1}
                for index, value in enumerate(values)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
