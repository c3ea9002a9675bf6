"""Sections of params.yaml for labels by a judge (`annotate`) and for language-model judges."""

from enum import Enum
from typing import Annotated

from pydantic import Field, field_validator

from stages.lib.core.params.shared import URL_PATTERN, ParamsSection

# Part of every request, so part of the answer cache's keys: another wording means new answers
DEFAULT_RUBRIC = (
    "The response continues the prompt, a short text. Prefer the response that, read with its "
    "prompt, is the more positive in mood; of two alike, the one that reads more naturally. "
    "Length, emoji and exclamation marks are no merit."
)


class Annotator(str, Enum):
    dataset = "dataset"
    judge = "judge"


class JudgeName(str, Enum):
    lexicon = "lexicon"
    endpoint = "endpoint"


class EndpointParams(ParamsSection):
    """A language model as judge, behind OpenAI's chat completions protocol."""

    base_url: str | None = Field(
        None,
        pattern=URL_PATTERN,
        description="The server's address with its /v1, e.g. http://127.0.0.1:8000/v1.",
    )
    model: str | None = Field(None, description="The model's name on that server.")
    api_key_env: str = Field(
        "OPENAI_API_KEY",
        pattern="^[A-Z][A-Z0-9_]*$",
        description="Environment variable with the API key. It is sent only to servers that "
        "[tool.rondo.api_keys] in pyproject.toml lists.",
    )
    rubric: str | dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], str] = Field(
        DEFAULT_RUBRIC,
        description="What makes a response better; or one text per dimension, `{helpful: ..., "
        "honest: ...}`: the response that more dimensions prefer is better.",
    )
    max_completion_tokens: int = Field(
        1024, ge=16, description="Tokens per answer at most, including thoughts."
    )
    concurrency: int = Field(4, ge=1, le=64, description="Parallel requests.")
    max_retries: int = Field(
        3,
        ge=0,
        description="Retries after no answer, a 429 or a 5xx, with growing waits.",
    )
    timeout: float = Field(60.0, gt=0, description="Seconds per answer.")
    price_per_million_input: float | None = Field(
        None, ge=0, description="Price of 1,000,000 input tokens; null: unknown."
    )
    price_per_million_output: float | None = Field(
        None, ge=0, description="Price of 1,000,000 output tokens; null: unknown."
    )

    @field_validator("rubric")
    @classmethod
    def dimensions_can_be_asked_for(cls, rubric: str | dict[str, str]) -> str | dict[str, str]:
        if not isinstance(rubric, str) and (not rubric or "reason" in rubric):
            raise ValueError(
                "expected one dimension at least, and none named reason: every answer has this key"
            )
        return rubric


class AnnotateParams(ParamsSection):
    annotator: Annotator = Field(
        Annotator.dataset,
        description="Who labels the pairs: `dataset`: people, in the data; `judge`: a judge "
        "compares SFT samples.",
    )
    judge: JudgeName = Field(
        JudgeName.lexicon,
        description="`lexicon`: sentiment; `endpoint`: a language model, see annotate.endpoint.",
    )
    prompts: int = Field(
        256, ge=1, description="Training prompts at most; each gives one pair, or none."
    )
    samples: int = Field(
        4,
        ge=2,
        le=8,
        description="SFT responses per prompt, all compared in both orders: n (n - 1) requests.",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of these responses.")
    agreement_pairs: int = Field(
        64,
        ge=1,
        description="Held-out human pairs at most, on which the judge is compared with people.",
    )
    endpoint: EndpointParams = Field(default_factory=EndpointParams)
