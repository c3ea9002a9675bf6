"""Section `gates` of params.yaml: the policy of each gate and the bounds of its thresholds.

stages/lib/thresholds declares the bounds, with the metric that each applies to, and why.
"""

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from stages.lib.core.params.shared import ParamsSection
from stages.lib.thresholds import PROMOTE, REWARD, SFT
from stages.lib.thresholds.form import Threshold


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
    if TYPE_CHECKING:

        def __getattr__(self, bound: str) -> float: ...


def bounds(thresholds: Iterable[Threshold]) -> dict[str, Any]:
    """The bounds as fields of a model; a default without a decimal point makes an integer."""
    return {
        one.bound: (
            type(one.default),
            Field(one.default, description=one.description, ge=one.ge, gt=one.gt, le=one.le),
        )
        for one in thresholds
        if one.default is not None
    }


SftGate = create_model("SftGate", __base__=Gate, **bounds(SFT))
RewardGate = create_model("RewardGate", __base__=Gate, **bounds(REWARD))
PromoteGate = create_model("PromoteGate", __base__=Gate, **bounds(PROMOTE))


class GatesParams(ParamsSection):
    if TYPE_CHECKING:
        sft: Gate = Gate()
        reward: Gate = Gate()
        promote: Gate = Gate()
    else:
        sft: SftGate = Field(default_factory=SftGate)
        reward: RewardGate = Field(default_factory=RewardGate)
        promote: PromoteGate = Field(default_factory=PromoteGate)
