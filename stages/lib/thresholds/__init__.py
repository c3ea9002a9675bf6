"""thresholds: each metric that a gate checks, the reason for its threshold, and what to do if it
fails.

A metric is a name in the metrics.json of a stage, or the difference of two; a stage has to compute
anything else. stages/lib/core/params/gates.py makes the section `gates` of params.yaml from it.
"""

from stages.lib.thresholds.form import Threshold
from stages.lib.thresholds.promote import PROMOTE
from stages.lib.thresholds.reward import REWARD
from stages.lib.thresholds.sft import SFT

__all__ = ["PROMOTE", "REWARD", "SFT", "THRESHOLDS"]
THRESHOLDS: dict[str, tuple[Threshold, ...]] = {"sft": SFT, "reward": REWARD, "promote": PROMOTE}
