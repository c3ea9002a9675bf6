"""What a policy's KL is worth: the KL at which best-of-n of SFT has the policy's reward, over the
policy's own.

Best-of-n is close to the most reward that a KL can buy (Gao, Schulman & Hilton 2023). Far below 1,
the training wastes KL, mostly on the noise of its gradients; near 1, only another reward model
gives a better policy at this KL.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stages.lib.metrics.stats import Interval, bootstrap_sums, percentile_interval


def best_of_n_kl(n: int) -> float:
    """KL of best-of-n from the policy that it samples from, nats per sequence; an upper bound if
    rewards are tied (Beirami et al. 2024, arXiv 2401.01879).

    >>> round(best_of_n_kl(16), 3)
    1.835
    """
    return math.log(n) - (n - 1) / n


def rise_per_distance(scores: Mapping[int, float]) -> float | None:
    """The slope of best-of-n's rise in score against sqrt(KL), by least squares; the rise is linear
    in it if SFT's scores are normal, so that it holds for larger n as well (docs/evaluation.md).

    Args:
        scores: mean score of best-of-n by n, with n = 1.

    Returns:
        Score units per sqrt(nat); None if no n above 1 has a higher score.
    """
    squared = {n: best_of_n_kl(n) for n in scores}
    products = sum((scores[n] - scores[1]) * math.sqrt(kl) for n, kl in squared.items())
    return products / sum(squared.values()) if products > 0 else None


def kl_efficiency(
    rises: Sequence[float], kls: Sequence[float], slope: float, resamples: int, seed: int
) -> Interval:
    """The efficiency with its 95% percentile interval by bootstrap over prompts; 0 without a rise.

    Args:
        rises: per prompt, the policy's mean score less SFT's.
        kls: per prompt, the policy's mean KL from SFT, nats per sequence.
        slope: `rise_per_distance`, which the interval takes as exact.
        resamples, seed: of the bootstrap.
    """
    prompts = len(rises)

    def efficiency(rise_sum: np.ndarray, kl_sum: np.ndarray) -> np.ndarray:
        return (np.maximum(rise_sum / prompts, 0) / slope) ** 2 / (kl_sum / prompts)

    low, high = percentile_interval(efficiency(*bootstrap_sums([rises, kls], resamples, seed)))
    return float(efficiency(np.sum(rises), np.sum(kls))), low, high
