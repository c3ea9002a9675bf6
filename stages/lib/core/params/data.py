"""Sections of params.yaml for rounds and data: `rounds`, `assets`, `prepare`."""

from enum import Enum
from typing import Annotated, Any

from pydantic import Field, model_validator

from stages.lib.core.params.shared import ParamsSection, PathText, PromptFormat

# A round's name is part of paths and of commands that a shell runs.
_NAME = "[a-z][a-z0-9_-]{0,31}"
RoundName = Annotated[str, Field(pattern=f"^{_NAME}$")]


START = "assets/start"  # in place of a round before the first one


class RoundParams(ParamsSection):
    previous: str = Field(
        pattern=f"^({START}|rounds/{_NAME})$",
        description=f"Outputs of the round before, e.g. `rounds/r0`; `{START}` for the first "
        "round.",
    )


class AssetsParams(ParamsSection):
    model: PathText = Field(
        "embedded",
        description="Base model: `embedded` (SmolLM2-135M-Instruct), `tiny` (random, for tests), "
        "a hub id with its commit (`org/name@commit`) or a local path.",
    )
    data: PathText = Field(
        "embedded",
        description="Data: `embedded` (human-rated tweets), `files` (see prepare.sources), or a "
        "hub id of preference pairs with its commit (`org/name@commit`).",
    )
    data_config: str | None = Field(
        None, description="Configuration (`data_dir`) of the hub data set, e.g. `harmless-base`."
    )


class SourceParams(ParamsSection):
    path: PathText = Field(
        description="A file (docs/data.md, *Files*), a folder of them, or a hub id with its commit."
    )
    split: str = Field("train", description="Split of a folder or of a hub data set.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="The file's names of columns, for a form that is not known: `{prompt: question,"
        " chosen: better, rejected: worse}`; also `completion`, `rating`, `margin`; `a.b` is b "
        "within a.",
    )
    use: str = Field(
        "train",
        pattern="^(train|eval)$",
        description="`train`, or `eval`: rows are held out and never trained on.",
    )


class SpeakerMarkers(str, Enum):
    """What happens to a row of which a turn contains the marker of another speaker."""

    drop = "drop"
    keep = "keep"


class PrepareParams(ParamsSection):
    sources: list[SourceParams] = Field(
        default_factory=list, description="The user's own data; used if assets.data is `files`."
    )
    columns: list[str] = Field(
        default_factory=list,
        description="Further columns of the sources that the rewards of PPO get, e.g. `[answer]`.",
    )
    prompt_format: PromptFormat = Field(
        PromptFormat.plain,
        description="`plain`: the response continues the prompt; `chat`: the model's chat "
        "template.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the chat template, e.g. `{enable_thinking: false}`; needs "
        "prompt_format chat.",
    )
    prompt_words: int = Field(
        4,
        ge=1,
        le=64,
        description="Embedded data: words at the start of a text that become its prompt.",
    )
    min_rating_gap: float = Field(
        0.8,
        gt=0,
        description="Embedded data: smallest difference of mean human ratings (-4..4) within a "
        "pair.",
    )
    demonstration_rating: float = Field(
        1.0, description="Embedded data: lowest mean human rating (-4..4) of an SFT demonstration."
    )
    eval_share: float = Field(
        0.2, gt=0, lt=1, description="Share of prompt groups that is held out."
    )
    max_bad_share: float = Field(
        0.02, ge=0, le=1, description="The stage stops if more than this share of rows is invalid."
    )
    near_duplicate: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Jaccard similarity of word 3-grams above which a row counts as a duplicate.",
    )
    speaker_markers: SpeakerMarkers = Field(
        SpeakerMarkers.drop,
        description="Rows of which a turn has a line that begins with a speaker's marker, e.g. "
        "`Human:`: `drop` and count them, or `keep` them, e.g. if answers contain dialogues.",
    )
    max_prompt_tokens: int = Field(
        64, ge=1, description="Longer prompts are dropped and counted (tokens)."
    )
    max_rows: int | None = Field(
        None,
        ge=8,
        description="Use at most the first this many rows of each source; null: all.",
    )
    max_eval_prompts: int = Field(
        88, ge=2, description="Largest size of the frozen evaluation set, in prompts."
    )

    @model_validator(mode="after")
    def template_is_used(self) -> "PrepareParams":
        if self.chat_template_kwargs and self.prompt_format is PromptFormat.plain:
            raise ValueError(
                "chat_template_kwargs are arguments of a chat template, which prompt_format plain "
                "does not use: set prompt_format to chat, or remove them"
            )
        return self


def rounds(number: int) -> dict[str, RoundParams]:
    """`number` rounds r0, r1, ..., each with the one before as its predecessor."""
    return {
        f"r{i}": RoundParams(previous=f"rounds/r{i - 1}" if i else START) for i in range(number)
    }
