"""Intervals, calibration and correlation: thin, typed faces of scipy and numpy."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest, norm

Bin = tuple[float, float, int]


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927); z = 1.96 gives 95%.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if n < 1:
        raise ValueError("an interval needs at least one trial")
    interval = binomtest(successes, n).proportion_ci(
        confidence_level=1 - 2 * norm.sf(z), method="wilson"
    )
    return float(interval.low), float(interval.high)


def paired_bootstrap(
    clusters: Sequence[Sequence[float]], resamples: int, seed: int
) -> tuple[float, float, float]:
    """Mean of all values with its 95% percentile interval, as (mean, low, high).

    clusters: one sequence a prompt, e.g. the differences A - B of its samples, or outcomes 1, 0.5,
    0. Samples of one prompt are not independent, so whole prompts are resampled (Efron & Tibshirani
    1993, ch. 8).

    Raises:
        ValueError: no cluster, or an empty one.
    """
    sums = np.array([sum(values) for values in clusters], dtype=float)
    sizes = np.array([len(values) for values in clusters], dtype=float)
    if not len(sums) or not sizes.all():
        raise ValueError("a bootstrap needs at least one prompt, and a value for each")
    mean = float(sums.sum() / sizes.sum())
    drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return mean, float(low), float(high)


def prompts_needed(prompts: int, rate: float, low: float, high: float) -> int | None:
    """How many prompts it would take for a win rate's interval to leave 0.5, if the rate stays as
    it is.

    An interval's half width shrinks with the root of the prompts: n (half width / |rate - 0.5|)^2,
    rounded up, and more than there are. None where the interval decides already, or the rate is
    0.5, which no number of prompts decides.
    """
    if not low <= 0.5 <= high or rate == 0.5:
        return None
    return max(prompts + 1, math.ceil(prompts * ((high - low) / 2 / abs(rate - 0.5)) ** 2))


def calibration(margins: Sequence[float], bins: int = 10) -> tuple[float, list[Bin]]:
    """Expected calibration error of a Bradley-Terry model on pairs, and its reliability bins.

    margins: score of chosen - rejected. The model's confidence that its preference is right is
    sigmoid(|margin|), in 0.5..1; it is right when margin > 0 (0 counts half). Returns (ECE, [(mean
    confidence, share right, pairs)]) for the bins of equal width that are not empty. Source: Guo et
    al. 2017, eq. 3.
    """
    values = np.asarray(margins, dtype=float)
    confidence = 1 / (1 + np.exp(-np.abs(values)))
    right = (values > 0) + 0.5 * (values == 0)
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    rows = [
        (
            float(confidence[place == b].mean()),
            float(right[place == b].mean()),
            int((place == b).sum()),
        )
        for b in np.unique(place)
    ]
    return sum(
        count / len(values) * abs(predicted - observed) for predicted, observed, count in rows
    ), rows


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None where it is undefined (fewer than two points, or a constant)."""
    if len(x) < 2 or min(x) == max(x) or min(y) == max(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def partial_correlation(
    x: Sequence[float], y: Sequence[float], given: Sequence[Sequence[float]]
) -> float | None:
    """Pearson's correlation of what is left of x and y when the variables in `given` have explained
    what they can, linearly.

    None where it is undefined: too few points, or nothing left of x or y.
    """
    if len(x) < len(given) + 3:
        return None
    explaining = np.column_stack([np.ones(len(x)), *given])
    both = np.column_stack([x, y])
    left = both - explaining @ np.linalg.lstsq(explaining, both, rcond=None)[0]
    if (left.std(0) <= 1e-9 * np.abs(both).max(0)).any():
        return None
    return float(np.corrcoef(left.T)[0, 1])


def connected_groups(links: Sequence[tuple[Hashable, Hashable]]) -> list[list[int]]:
    """The places of links that hang together, e.g. of pairs by the texts they share."""
    number: dict[Hashable, int] = {}
    ends = [[number.setdefault(end, len(number)) for end in link] for link in links]
    rows, columns = np.array(ends, dtype=int).reshape(-1, 2).T
    _, labels = connected_components(
        coo_array((np.ones(len(ends)), (rows, columns)), shape=(len(number), len(number))),
        directed=False,
    )
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(int(labels[row]), []).append(place)
    return list(groups.values())
