"""Sections of params.yaml for tests of models: `battery`, `evaluate`, `capability`, `replay`."""

from enum import Enum
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from stages.lib.core.files import metric_name
from stages.lib.core.params.judging import EndpointParams, JudgeName
from stages.lib.core.params.shared import ParamsSection, PathText

# Name of the judge that the reward stage trains on pairs that the reward model does not see
HELD_OUT_REWARD_MODEL = "apart"
FLUENCY, ZERO_SHOT = "fluency", "zero_shot"  # judges that ask the model before SFT
BUILT_IN_JUDGES = (JudgeName.lexicon.value, ZERO_SHOT, FLUENCY, HELD_OUT_REWARD_MODEL)


class CapabilityParams(ParamsSection):
    tasks: list[str] = Field(
        [],
        description="Tasks of lm-eval (an extra: docs/evaluation.md): its own, or those of "
        "slices/*.yaml.",
    )
    limit: int | None = Field(None, ge=1, description="Documents per task at most; null: all.")
    response_length: int = Field(
        64, ge=1, description="Tokens per response to a prompt of slices/, at most."
    )
    batch_size: int = Field(32, ge=1, description="Sequences per forward pass.")


class ReplayParams(ParamsSection):
    max_badcases: int = Field(
        64, ge=1, description="Badcases kept per round at most, the worst of each cause first."
    )
    sentiment_low: float = Field(
        0.0,
        description="Sentiment (-1..1) below which a sample counts as bad, if the lexicon is a "
        "judge.",
    )
    score_high: float = Field(
        1.0,
        description="Calibrated reward-model score (standard deviations) above which a sample "
        "counts as liked.",
    )
    kl_outlier: float = Field(
        3.0,
        gt=0,
        description="Robust z-score of the KL per sequence above which a sample is an outlier.",
    )
    repetition: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Share of repeated 3-grams within a text that makes it a badcase.",
    )
    exploit_share: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Share of policy samples that must end in a suffix to make it an exploit "
        "candidate.",
    )
    exploit_lift: float = Field(
        3.0,
        gt=1,
        description="How many times more often than in SFT samples an exploit must occur.",
    )
    best_of: int = Field(
        4,
        ge=1,
        description="SFT samples per badcase; the jury's best one is the better answer. Also the "
        "policy samples per prompt of policy_pairs.",
    )
    policy_pairs: int = Field(
        0,
        ge=0,
        description="Training prompts for each of which the jury compares responses of the policy "
        "that have about the same length; its best and its worst become a pair of the next round's "
        "reward model.",
    )
    tries: int = Field(
        4,
        ge=1,
        description="New responses per retested badcase; repaired if none fails, regressed if all "
        "fail.",
    )
    pairs_per_exploit: int = Field(
        48, ge=0, description="Human training pairs used to make pairs against each exploit."
    )
    weight: int = Field(
        1,
        ge=1,
        description="Copies of each replayed row in the next round's data, before max_share is "
        "applied.",
    )
    max_share: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Largest share of replayed rows, of all rounds, in the next round's data; the "
        "newest rows stay.",
    )


class ZeroShotParams(ParamsSection):
    """What the judge `zero_shot` asks of the model before SFT, after each text."""

    question: str = Field(" I feel", min_length=1, description="What follows the text.")
    better: str = Field(" great", min_length=1, description="The answer after a good text.")
    worse: str = Field(" terrible", min_length=1, description="The answer after a bad text.")

    @model_validator(mode="after")
    def answers_differ(self) -> Self:
        if self.better == self.worse:
            raise ValueError("better and worse are the same answer: all texts would tie")
        return self


class EvaluateParams(ParamsSection):
    judges: list[Annotated[PathText, Field(min_length=1)]] = Field(
        ["lexicon", "zero_shot", "fluency"],
        min_length=1,
        description="The judges: `lexicon`; `zero_shot`, see evaluate.zero_shot; `fluency`, "
        "against garbled texts; `endpoint`, see annotate.endpoint; `endpoint:name`, see "
        "evaluate.endpoints; `apart`, see reward.judge_share; `module:name`, a function `(prompts, "
        "responses) -> list[float]`; the folder of a reward model.",
    )
    zero_shot: ZeroShotParams = ZeroShotParams()
    endpoints: dict[str, EndpointParams] = Field(
        {},
        description="More language models as judges, by name; `judges` lists them as "
        "`endpoint:name`.",
    )
    samples_per_prompt: int = Field(2, ge=1, description="Responses per evaluation prompt.")
    checkpoint_samples_per_prompt: int = Field(
        1, ge=1, description="Responses per prompt for intermediate PPO checkpoints."
    )
    tie_margin: float = Field(
        0.05, ge=0, description="Score differences up to this count as a tie."
    )
    bootstrap_resamples: int = Field(
        10_000, ge=100, description="Bootstrap resamples per 95% interval."
    )

    @field_validator("judges")
    @classmethod
    def each_judge_once(cls, judges: list[str]) -> list[str]:
        names = [metric_name(named) for named in judges]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is listed more than once")
        return judges


class Edit(str, Enum):
    lower_case = "lower_case"
    quoted = "quoted"
    typo = "typo"


class BatteryParams(ParamsSection):
    pairs: int = Field(
        96,
        ge=1,
        description="Held-out pairs that share no text; probes and endings are tried on them.",
    )
    prompts: int = Field(
        32,
        ge=1,
        description="Training prompts for best-of-n; SFT answers each as often as the largest n.",
    )
    best_of: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 4, 16], min_length=1, description="The n of best-of-n."
    )
    endings: list[Annotated[str, Field(min_length=1)]] = Field(
        ["!", " 😃", " Enjoy!"],
        min_length=1,
        description="Endings that must not make a bad text score above a good one.",
    )
    edits: list[Edit] = Field(
        list(Edit),
        min_length=1,
        description="Edits that keep the meaning, so that they must not change which text is "
        "better: `lower_case`, `quoted` (in quotation marks), `typo` (two letters swapped).",
    )
