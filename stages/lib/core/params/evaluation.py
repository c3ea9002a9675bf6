"""What comes after the policy: what it must not lose, and what its failures become."""

from pydantic import Field

from stages.lib.core.params.section import Section


class CapabilityParams(Section):
    tasks: list[str] = Field(
        [],
        description="Tasks of lm-eval (an extra: docs/evaluation.md), its own or of slices/*.yaml.",
    )
    limit: int | None = Field(None, ge=1, description="Documents of a task at most; null: all.")
    response_length: int = Field(
        64, ge=1, description="Tokens of an answer to a prompt of slices/ at most."
    )
    batch_size: int = Field(32, ge=1, description="Sequences at once.")


class ReplayParams(Section):
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
