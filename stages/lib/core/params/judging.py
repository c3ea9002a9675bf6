"""Who judges: labels in place of people (annotate), and the jury of evaluate."""

from enum import Enum
from typing import Annotated

from pydantic import Field, field_validator

from stages.lib.core.params.shared import ParamsSection


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
        pattern="^https?://",
        description="Of the server, with its /v1, e.g. http://127.0.0.1:8000/v1.",
    )
    model: str | None = Field(None, description="The model's name there.")
    api_key_env: str = Field(
        "OPENAI_API_KEY",
        description="Environment variable that holds the key; it may be unset for a server without.",
    )
    rubric: str | dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], str] = Field(
        "The response continues the prompt, a short text. Prefer the response that, read with its prompt, is the more positive in mood; "
        "of two alike, the one that reads more naturally. Length, emoji and exclamation marks are no merit.",
        description="What makes a response the better one; or by dimension, `{helpful: ..., honest: ...}`: better is what more prefer.",
    )
    max_completion_tokens: int = Field(1024, ge=16, description="Of one answer, thoughts included.")
    concurrency: int = Field(4, ge=1, le=64, description="Questions at once.")
    max_retries: int = Field(
        3,
        ge=0,
        description="Tries again after no answer, a 429 or a 5xx, waiting longer each time.",
    )
    timeout: float = Field(60.0, gt=0, description="Seconds for one answer.")
    price_per_million_input: float | None = Field(
        None, ge=0, description="Money for 1,000,000 tokens read; null: unknown."
    )
    price_per_million_output: float | None = Field(
        None, ge=0, description="Money for 1,000,000 tokens written; null: unknown."
    )

    @field_validator("rubric")
    @classmethod
    def dimensions_can_be_asked_for(cls, rubric: str | dict[str, str]) -> str | dict[str, str]:
        if not isinstance(rubric, str) and (not rubric or "reason" in rubric):
            raise ValueError(
                "expected one dimension at least, and none named reason, which every answer has"
            )
        return rubric


class AnnotateParams(ParamsSection):
    annotator: Annotator = Field(
        Annotator.dataset,
        description="Who labels: `dataset`: people, in the data; `judge`: a judge, SFT's samples.",
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
        description="SFT responses a prompt, each compared with each in both orders: n (n - 1) questions.",
    )
    temperature: float = Field(1.0, gt=0, description="Of these responses.")
    agreement_pairs: int = Field(
        64,
        ge=1,
        description="Held-out human pairs at most on which the judge is measured against people.",
    )
    endpoint: EndpointParams = Field(default_factory=EndpointParams)
