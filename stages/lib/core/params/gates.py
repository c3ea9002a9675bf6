"""`gates:` of params.yaml: what each gate does, and its bands' bounds. What the bands are of:
stages/gate/thresholds.py.
"""

from enum import Enum

from pydantic import Field

from stages.lib.core.params.shared import ParamsSection


class Policy(str, Enum):
    block = "block"
    warn = "warn"
    ask = "ask"


class Gate(ParamsSection):
    policy: Policy = Field(
        Policy.block,
        description="What a number out of its band does: `block` stops the round, `warn` is told and passed, "
        "`ask` waits for a person's reason (`rondo approve`, or the form in the Prefect UI).",
    )


class SftGate(Gate):
    loss_drop: float = Field(
        0.2, description="Least fall of held-out loss from the base model, nats a token."
    )
    judged_gain: float = Field(
        -0.05,
        description="Least lower bound of the 95% interval of judged sentiment, SFT - base, on fixed prompts.",
    )
    eos_gap: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Most that the share of ended responses may lack of the demonstrations'.",
    )
    length_low: float = Field(
        0.5,
        ge=0,
        description="Least mean length of responses, as a multiple of the demonstrations'.",
    )
    length_high: float = Field(1.5, gt=0, description="Most of the same.")
    repetition_rise: float = Field(
        0.05,
        ge=0,
        description="Most rise of the share of repeated 3-grams over the demonstrations'.",
    )
    memorised: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Most share of responses that copy 8 words in a row, over the held-out texts that do.",
    )


class RewardGate(Gate):
    accuracy: float = Field(
        0.8, ge=0, le=1, description="Least lower bound of the 95% interval of held-out accuracy."
    )
    margin: float = Field(0.5, description="Least mean margin chosen - rejected on held-out pairs.")
    baseline_lead: float = Field(
        0.0, description="Accuracy must exceed longest-wins and TF-IDF by more than this."
    )
    judge_lead: float = Field(
        -0.1,
        description="Accuracy may be below the independent judge's by at most this (negative).",
    )
    worst_slice: float = Field(
        0.65, ge=0, le=1, description="Least accuracy in any slice of 30 or more held-out pairs."
    )
    ece: float = Field(
        0.1, ge=0, le=1, description="Most expected calibration error of sigmoid(margin)."
    )
    reload: float = Field(
        0.001,
        ge=0,
        description="Most difference of raw scores between the trained model and the saved one.",
    )
    centre: float = Field(
        0.5,
        ge=0,
        description="Most distance from 0 of held-out demonstrations' mean score, standard deviations.",
    )
    drift: float = Field(
        4.0,
        gt=0,
        description="Most distance of SFT samples' mean score from demonstrations', standard deviations.",
    )
    scale_low: float = Field(
        0.33,
        ge=0,
        description="Least spread of scores of SFT's samples, as a multiple of the demonstrations'.",
    )
    scale_high: float = Field(3.0, gt=0, description="Most of the same.")
    length_correlation: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Most correlation of score and length, label and judge held fixed.",
    )
    probe: float = Field(
        0.25, ge=0, le=1, description="Most share of texts that any corruption makes score higher."
    )
    ending: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Most share of rightly ranked pairs that an appended ending turns round, for any ending.",
    )
    mined: float = Field(
        0.3, ge=0, le=1, description="The same for endings mined from what a policy wrote."
    )
    best_of_n_rise: float = Field(
        0.0,
        description="Best-of-n by this reward must raise the judge by more than this (lower bound).",
    )


class PromoteGate(Gate):
    win_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Least lower bound of the 95% interval of the win rate against SFT.",
    )
    champion_win_rate: float = Field(
        0.38,
        ge=0,
        le=1,
        description="The same against the champion, the last policy that was promoted: what it may lose is 0.5 less this.",
    )
    dangers: int = Field(
        0,
        ge=0,
        description="Most dangers that PPO's health had found when the kept policy was reached.",
    )
    max_kl: float = Field(8.0, gt=0, description="Most KL from SFT, nats a sequence.")
    distinct_2: float = Field(
        0.65, ge=0, le=1, description="Least share of distinct 2-grams across prompts."
    )
    repetition_rise: float = Field(
        0.05, ge=0, description="Most rise of the share of repeated 3-grams over SFT's."
    )
    regressed: int = Field(
        0, ge=0, description="Most badcases that were repaired before and fail again."
    )
    eos_fall: float = Field(
        0.1, ge=0, le=1, description="Most that the share of ended responses may fall below SFT's."
    )
    slice_fall: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Most that the policy may be worse than SFT in any slice or task: upper bound of the 95% interval.",
    )
    human_nll_rise: float = Field(
        1.0,
        ge=0,
        description="Most rise over SFT of the held-out loss of people's texts, nats a token.",
    )


class GatesParams(ParamsSection):
    sft: SftGate = Field(default_factory=SftGate)
    reward: RewardGate = Field(default_factory=RewardGate)
    promote: PromoteGate = Field(default_factory=PromoteGate)
