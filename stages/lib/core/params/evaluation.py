"""What comes after the policy: what it must not lose, and what its failures become."""

from typing import Annotated

from pydantic import Field, field_validator

from stages.lib.core.files import metric_name
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.params.shared import ParamsSection

HELD_OUT_REWARD_MODEL = "apart"  # the judge that the reward stage trains on pairs of its own


class CapabilityParams(ParamsSection):
    tasks: list[str] = Field(
        [],
        description="Tasks of lm-eval (an extra: docs/evaluation.md), its own or of slices/*.yaml.",
    )
    limit: int | None = Field(None, ge=1, description="Documents of a task at most; null: all.")
    response_length: int = Field(
        64, ge=1, description="Tokens of an answer to a prompt of slices/ at most."
    )
    batch_size: int = Field(32, ge=1, description="Sequences at once.")


class ReplayParams(ParamsSection):
    max_badcases: int = Field(
        64, ge=1, description="Most badcases kept a round, worst first within each cause."
    )
    judge_low: float = Field(
        0.0,
        description="Sentiment (-1..1) below which a sample counts as bad, where the lexicon is a judge.",
    )
    score_high: float = Field(
        1.0,
        description="Calibrated reward-model score above which it counts as liked by the reward model.",
    )
    kl_outlier: float = Field(
        3.0, gt=0, description="Robust z-score of sequence KL above which a sample is an outlier."
    )
    repetition: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Share of repeated 3-grams in one text that makes it a badcase.",
    )
    exploit_share: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Share of policy samples in which a suffix must occur to be an exploit candidate.",
    )
    exploit_lift: float = Field(
        3.0, gt=1, description="How much more often than in the SFT model's samples."
    )
    best_of: int = Field(
        4,
        ge=1,
        description="SFT samples drawn a badcase; the jury's best one is the better answer.",
    )
    tries: int = Field(
        4,
        ge=1,
        description="New responses when a badcase is tried again: repaired if none fails, regressed if all do.",
    )
    pairs_per_exploit: int = Field(
        48, ge=0, description="Human training pairs turned against each exploit."
    )
    weight: int = Field(
        1,
        ge=1,
        description="How often each replayed row is in the next round's data, before max_share cuts.",
    )
    max_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Replayed rows are at most this share of the next round's data.",
    )


class EvaluateParams(ParamsSection):
    judges: list[Annotated[str, Field(min_length=1)]] = Field(
        ["lexicon", "fluency"],
        min_length=1,
        description="Who compares: `lexicon`; `fluency`, against garbled texts; `endpoint`, see annotate.endpoint; `endpoint:name`, see "
        "evaluate.endpoints; `apart`, see reward.judge_share; `module:name` of `number(prompts, responses) -> list[float]`; the folder of "
        "a reward model.",
    )
    endpoints: dict[str, EndpointParams] = Field(
        {},
        description="More language models as judges, by the name that `judges` has them by: `endpoint:name`.",
    )
    samples_per_prompt: int = Field(2, ge=1)
    checkpoint_samples_per_prompt: int = Field(
        1, ge=1, description="For the intermediate PPO checkpoints."
    )
    batch_size: int = Field(88, ge=1, description="Sequences generated at once.")
    tie_margin: float = Field(0.05, ge=0, description="Judge differences up to this are ties.")
    bootstrap_resamples: int = Field(10_000, ge=100)

    @field_validator("judges")
    @classmethod
    def each_judge_once(cls, judges: list[str]) -> list[str]:
        names = [metric_name(named) for named in judges]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is there more than once")
        return judges


class BatteryParams(ParamsSection):
    pairs: int = Field(
        96,
        ge=1,
        description="Held-out pairs, of those that share no text, on which probes and endings are tried.",
    )
    prompts: int = Field(
        32,
        ge=1,
        description="Training prompts that the SFT model answers, `best_of`'s largest number of times each.",
    )
    best_of: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 4, 16], min_length=1, description="Sizes of best-of-n."
    )
    endings: list[Annotated[str, Field(min_length=1)]] = Field(
        ["!", " 😃", " Enjoy!"],
        min_length=1,
        description="What a bad text must not become better than a good one by.",
    )
