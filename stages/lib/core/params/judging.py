"""Sections of params.yaml for labels by a judge (`annotate`) and for language-model judges."""

from enum import Enum
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from stages.lib.core.params.shared import URL_PATTERN, ParamsSection, PathText


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
    rubric: str | dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], str] | None = Field(
        None,
        description="What makes a response better for your task; or one text per dimension, "
        "`{helpful: ..., honest: ...}`: the response that more dimensions prefer is better.",
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
    def dimensions_can_be_asked_for(
        cls, rubric: str | dict[str, str] | None
    ) -> str | dict[str, str] | None:
        if isinstance(rubric, str) and not rubric.strip():
            raise ValueError("expected a text that says what makes a response better")
        if isinstance(rubric, dict) and (not rubric or "reason" in rubric):
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
    constitution: PathText | None = Field(
        None,
        pattern=r"\.(txt|md)$",
        description="A text file with one principle per line, by which the language model of "
        "annotate.endpoint labels pairs (in place of its rubric) and revises responses; null: off.",
    )
    revisions: int = Field(
        0,
        ge=0,
        description="Training prompts at most whose SFT response the language model criticises and "
        "revises by the constitution, as demonstrations of the next round; 0: off.",
    )
    endpoint: EndpointParams = Field(default_factory=EndpointParams)

    @property
    def asks_language_model(self) -> bool:
        """Whether the stage sends requests to annotate.endpoint."""
        labels = self.annotator is Annotator.judge and self.judge is JudgeName.endpoint
        return labels or self.constitution is not None

    @model_validator(mode="after")
    def constitution_is_used(self) -> "AnnotateParams":
        if self.revisions and self.constitution is None:
            raise ValueError(
                f"annotate.revisions is {self.revisions}: set annotate.constitution, the file with "
                "the principles (docs/annotate.md)"
            )
        if self.constitution is None:
            return self
        if self.annotator is Annotator.judge and self.judge is not JudgeName.endpoint:
            raise ValueError(
                "annotate.constitution is for a language model: set annotate.judge to endpoint"
            )
        if self.annotator is Annotator.dataset and not self.revisions:
            raise ValueError(
                "annotate.constitution is not used: set annotate.annotator to judge for labels by "
                "it, or annotate.revisions for demonstrations, or annotate.constitution to null"
            )
        return self
