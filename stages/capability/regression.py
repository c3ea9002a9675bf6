"""How much worse one model is than another on the same prompts. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy.stats import norm

from stages.lib.core.types import Row


def paired_drop(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Mean of before - after, paired, with its 95% interval, as (mean, low, high), of values in
    0..1.

    Bonett & Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data": as if one more pair were lost and one more won, so that a few pairs that
    agree do not pass for certainty, as they would in a bootstrap.

    Raises:
        ValueError: no pair.
    """
    falls = [x - y for x, y in zip(before, after, strict=True)]
    if not falls:
        raise ValueError("an interval needs at least one pair")
    more = np.array([*falls, 1.0, -1.0])
    half = norm.ppf(0.975) * more.std() / math.sqrt(len(more))
    return (
        sum(falls) / len(falls),
        float(max(more.mean() - half, -1.0)),
        float(min(more.mean() + half, 1.0)),
    )


def regression_metrics(sft: Sequence[float], policy: Sequence[float]) -> Row:
    """Means over prompts or documents, 0..1, more is better; fall: what the policy has lost, with
    its paired 95% interval.
    """
    fall, low, high = paired_drop(sft, policy)
    return {
        "prompts": len(sft),
        "sft": fmean(sft),
        "policy": fmean(policy),
        "fall": fall,
        "fall_low": low,
        "fall_high": high,
    }
