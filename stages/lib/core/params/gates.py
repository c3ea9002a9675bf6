"""Section `gates` of params.yaml: the policy of each gate and the bounds of its thresholds.

stages/gate/thresholds defines which metric each bound applies to, and why.
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
        description="If a number is beyond its threshold: `block` stops the round, `warn` reports "
        "it and passes, `ask` waits for a person's reason (`rondo approve`, or the form "
        "in the Prefect UI).",
    )


class SftGate(Gate):
    loss_drop: float = Field(
        0.2, description="Smallest drop of held-out loss from the base model, nats per token."
    )
    net_win_rate: float = Field(
        -0.2,
        ge=-1,
        le=1,
        description="Smallest lower bound (95%) of wins less losses of SFT against the base model, "
        "as shares, by the primary judge on fixed prompts.",
    )
    eos_gap: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Largest amount by which the share of ended responses is below the "
        "demonstrations'.",
    )
    length_low: float = Field(
        0.5,
        ge=0,
        description="Smallest mean length of responses, as a multiple of the demonstrations'.",
    )
    length_high: float = Field(
        1.5,
        gt=0,
        description="Largest mean length of responses, as a multiple of the demonstrations'.",
    )
    repetition_rise: float = Field(
        0.05,
        ge=0,
        description="Largest rise of the share of repeated 3-grams over the demonstrations'.",
    )
    memorised: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Largest share of responses that copy 8 words in a row, minus that of "
        "held-out texts.",
    )


class RewardGate(Gate):
    accuracy: float = Field(
        0.8, ge=0, le=1, description="Smallest lower bound (95%) of held-out accuracy."
    )
    margin: float = Field(
        0.5, description="Smallest mean margin chosen - rejected on held-out pairs."
    )
    baseline_lead: float = Field(
        0.0, description="Accuracy must exceed those of longest-wins and TF-IDF by more than this."
    )
    judge_accuracy: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Accuracy of the primary judge on held-out pairs: its lower bound (95%) must "
        "exceed this.",
    )
    judge_lead: float = Field(
        -0.1,
        description="Smallest lead of accuracy over the primary judge's; negative: it may be "
        "below.",
    )
    worst_slice: float = Field(
        0.65, ge=0, le=1, description="Smallest accuracy in any slice of 30 or more held-out pairs."
    )
    worst_slice_low: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Smallest lower bound of the accuracy in any slice of 30 or more held-out "
        "pairs.",
    )
    lineage: float = Field(
        0.5,
        ge=0,
        description="Largest distance of the reward model's weights from SFT's, relative to SFT's.",
    )
    ece: float = Field(
        0.1, ge=0, le=1, description="Largest expected calibration error of sigmoid(|margin|)."
    )
    reload: float = Field(
        0.001,
        ge=0,
        description="Largest difference of raw scores between the trained and the saved model.",
    )
    centre: float = Field(
        0.5,
        ge=0,
        description="Largest distance from 0 of the mean score of held-out demonstrations, in "
        "standard deviations.",
    )
    drift: float = Field(
        4.0,
        gt=0,
        description="Largest distance between the mean scores of SFT samples and demonstrations, "
        "in standard deviations.",
    )
    scale_low: float = Field(
        0.33,
        ge=0,
        description="Smallest spread of scores of SFT samples, as a multiple of the "
        "demonstrations'.",
    )
    scale_high: float = Field(
        3.0,
        gt=0,
        description="Largest spread of scores of SFT samples, as a multiple of the "
        "demonstrations'.",
    )
    length_correlation: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Largest correlation of score and length, with label and judge held fixed.",
    )
    probe: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Largest share of texts that score higher when corrupted, for any corruption.",
    )
    flip: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Largest share of correctly ranked pairs that an edit which keeps the meaning "
        "ranks wrongly.",
    )
    ending: float = Field(
        0.3,
        ge=0,
        le=1,
        description="Largest share of correctly ranked pairs that an appended ending reverses "
        "against the primary judge, for any ending.",
    )
    mined: float = Field(
        0.3, ge=0, le=1, description="The same for endings mined from texts of a policy."
    )
    best_of_n_rise: float = Field(
        0.0,
        description="Best-of-n by this reward must raise the judge's score by more than this "
        "(lower bound).",
    )


class PromoteGate(Gate):
    win_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Smallest lower bound (95%) of the win rate against SFT.",
    )
    champion_win_rate: float = Field(
        0.38,
        ge=0,
        le=1,
        description="Smallest lower bound (95%) of the win rate against the champion, the last "
        "promoted policy.",
    )
    dangers: int = Field(
        0,
        ge=0,
        description="Most dangers that PPO's health monitor found up to the selected policy.",
    )
    max_kl_per_token: float = Field(
        0.6, gt=0, description="Largest KL from SFT, nats per token of SFT's responses."
    )
    distinct_2: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Smallest expected share of distinct 2-grams among 200 across prompts.",
    )
    repetition_rise: float = Field(
        0.05, ge=0, description="Largest rise of the share of repeated 3-grams over SFT's."
    )
    regressed: int = Field(
        0, ge=0, description="Most badcases that were repaired before and fail again."
    )
    eos_fall: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Largest amount by which the share of ended responses is below SFT's.",
    )
    slice_fall: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Largest loss against SFT in any slice or task: upper bound (95%).",
    )
    human_nll_rise: float = Field(
        1.0,
        ge=0,
        description="Largest rise over SFT of the loss on held-out human texts, nats per token.",
    )


class GatesParams(ParamsSection):
    sft: SftGate = Field(default_factory=SftGate)
    reward: RewardGate = Field(default_factory=RewardGate)
    promote: PromoteGate = Field(default_factory=PromoteGate)
