"""Policies between the reference and a trained policy, on the line through their weights.

Linear interpolation towards the initialisation (LITI) of Ramé et al. 2024 (WARP, arXiv
2406.16768): at the same KL, a policy that was trained for longer and is scaled back is better than
an earlier one (docs/log.md).
"""

import math
from collections.abc import Callable, Sequence
from statistics import geometric_mean

import torch

from stages.lib.core.types import StateDict
from stages.lib.lm.logprobs import Reference
from stages.lib.lm.world import local

# A policy beyond the trained one is a guess: with 1.3, one was worse than a later one (docs/log.md)
MAX_SCALE = 1.25
EXPONENT = 1.7  # KL is about proportional to scale ** EXPONENT (docs/log.md)
NEAR = 1.15  # ratio of scales for which that holds well enough
SCALE_TOLERANCE = 0.01  # 1.7% of the KL: less than its standard error
MAX_SCALED = 4  # policies that a search measures, at most


@torch.no_grad()
def interpolate(
    policy: torch.nn.Module, reference: Reference, trained: StateDict, scale: float
) -> None:
    """Give the weights of `policy` that are in `trained` the values
    reference + scale * (trained - reference).

    An adapter is this difference: its product B A is scaled by scaling B.

    Args:
        policy: the model whose weights change.
        reference: opens a context with the model as it was before training; not used for adapters.
        trained: copies of the adapter, or of all trained weights, by name; of a sharded policy, the
            parts of this process.
        scale: 0: the reference; 1: the trained policy.
    """
    parameters = dict(policy.named_parameters())
    if hasattr(policy, "peft_config"):
        for name, weight in trained.items():
            parameters[name].copy_(weight * scale if ".lora_B." in name else weight)
        return
    with reference() as model:
        start = dict(model.named_parameters())
        for name, weight in trained.items():
            local(parameters[name]).copy_(local(start[name]).lerp(weight, scale))


def search_scale(
    measure_kl: Callable[[float], float], first: tuple[float, float], target: float
) -> list[tuple[float, float]]:
    """Measure scaled policies until the estimated scale is that of the last one.

    Args:
        measure_kl: KL of the policy with a scale.
        first: (scale, KL) of the trained policy, or of a scaled one.
        target: the KL to find, in the same unit.

    Returns:
        (scale, KL) of `first` and of the measured policies; the last one is the result.
    """
    measured = [first]
    while len(measured) <= MAX_SCALED:
        positive = [(scale, max(value, 1e-8)) for scale, value in measured]
        scale = scale_for_kl(positive, max(target, 1e-8))
        if distance(scale, measured[-1][0]) <= SCALE_TOLERANCE:
            break
        measured.append((scale, measure_kl(scale)))
    return measured


def scale_for_kl(measured: Sequence[tuple[float, float]], target: float) -> float:
    """The scale at which the KL should be `target`, at most MAX_SCALE.

    Between two policies that are far apart, log KL is taken as linear in log scale. Else KL rises
    with EXPONENT; a measured KL has an error of several percent, so the estimate is a mean over the
    policies near it.

    Args:
        measured: (scale, KL) of policies on one line, both above 0, at least one.
        target: KL in the same unit, above 0.

    Example:
        >>> round(scale_for_kl([(1.0, 8.0)], 4.0), 3)  # (1/2) ** (1/1.7)
        0.665
        >>> round(scale_for_kl([(1.0, 8.0), (0.665, 4.4)], 4.0), 3)  # 0.665 (1/1.1) ** (1/1.7)
        0.629
        >>> round(scale_for_kl([(1.0, 8.0), (0.5, 2.0)], 4.0), 3)  # KL rises with scale ** 2
        0.707
    """
    low = max((point for point in measured if point[1] <= target), default=None)
    high = min((point for point in measured if point[1] > target), default=None)
    if low and high and high[0] > low[0] * NEAR:
        share = distance(target, low[1]) / distance(high[1], low[1])
        return min(low[0] * (high[0] / low[0]) ** share, MAX_SCALE)
    estimates = {(scale, kl): scale * (target / kl) ** (1 / EXPONENT) for scale, kl in measured}
    best = estimates[min(estimates, key=lambda point: distance(point[1], target))]
    near = [
        estimate
        for (scale, _), estimate in estimates.items()
        if distance(scale, best) <= math.log(NEAR)
    ]
    return min(geometric_mean(near or [best]), MAX_SCALE)


def distance(a: float, b: float) -> float:
    """Of two positive numbers, as the logarithm of their ratio."""
    return abs(math.log(a / b))
