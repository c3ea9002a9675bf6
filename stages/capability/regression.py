"""How much worse one model is than another on the same prompts. Pure functions."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy.stats import norm

from stages.lib.core.types import Metrics


def paired_drop(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """The mean of before - after with its 95% interval, as (mean, low, high), for values in 0..1.

    Bonett & Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data": one more pair counts as lost and one more as won, so that a few pairs
    that agree do not give an interval of width 0, as they would in a bootstrap.

    Raises:
        ValueError: there are no pairs.
    """
    drops = [x - y for x, y in zip(before, after, strict=True)]
    if not drops:
        raise ValueError("an interval needs at least one pair")
    adjusted = np.array([*drops, 1.0, -1.0])
    half_width = norm.ppf(0.975) * adjusted.std() / math.sqrt(len(adjusted))
    low = float(max(adjusted.mean() - half_width, -1.0))
    high = float(min(adjusted.mean() + half_width, 1.0))
    return sum(drops) / len(drops), low, high


def regression_metrics(sft: Sequence[float], policy: Sequence[float]) -> Metrics:
    """Means over prompts or documents (0..1, higher is better), and the drop from SFT to policy.

    The drop is called `fall`, with its paired 95% interval.
    """
    drop, low, high = paired_drop(sft, policy)
    return {
        "prompts": len(sft),
        "sft": fmean(sft),
        "policy": fmean(policy),
        "fall": drop,
        "fall_low": low,
        "fall_high": high,
    }
