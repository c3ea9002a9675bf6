"""Intervals, calibration, correlation and grouping: thin, typed wrappers of scipy and numpy."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest, norm, t

Bin = tuple[float, float, int]  # mean confidence, share of correct pairs, number of pairs
Interval = tuple[float, float, float]  # mean, and low and high end of its 95% interval
MIN_LABELS = 20  # of people, for `corrected_mean`


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927).

    Args:
        successes: number of successes.
        n: number of trials.
        z: half width in standard errors; 1.96 gives a 95% interval.

    Returns:
        (low, high), both in 0..1.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if n < 1:
        raise ValueError("an interval needs at least one trial")
    interval = binomtest(successes, n).proportion_ci(
        confidence_level=1 - 2 * norm.sf(z), method="wilson"
    )
    return float(interval.low), float(interval.high)


def mean(values: Sequence[float]) -> float:
    """Not `fmean`, which rounds otherwise in the last digit: recorded numbers would change."""
    return sum(values) / len(values)


def interval_names(name: str) -> tuple[str, str, str]:
    """The metrics that a mean with its interval has."""
    return name, f"{name}_low", f"{name}_high"


def with_interval(name: str, interval: Interval) -> dict[str, float]:
    """The three numbers as `name`, `name_low` and `name_high`."""
    return dict(zip(interval_names(name), interval, strict=True))


def paired_bootstrap(clusters: Sequence[Sequence[float]], resamples: int, seed: int) -> Interval:
    """Mean of all values with its 95% percentile interval by bootstrap.

    Samples of one prompt are not independent, so whole prompts are resampled (Efron & Tibshirani
    1993, ch. 8). Each value compares A and B on the same prompt, hence "paired".

    Args:
        clusters: one sequence per prompt, with one value per sample: a difference A - B, or an
            outcome (1 if A wins, 0.5 for a tie, 0).
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.

    Returns:
        (mean, low, high). Each value has the same weight, so a prompt weighs by its samples.

    Raises:
        ValueError: there is no cluster, or one is empty.

    Example:
        >>> mean, low, high = paired_bootstrap([[1.0, 1.0], [0.5], [0.0]] * 20, 1000, seed=0)
        >>> mean
        0.625
        >>> low < mean < high
        True
    """
    sums = np.array([sum(values) for values in clusters], dtype=float)
    sizes = np.array([len(values) for values in clusters], dtype=float)
    if not len(sums) or not sizes.all():
        raise ValueError("a bootstrap needs at least one prompt, and a value for each")
    # sums and sizes per prompt are enough for the mean of a resample
    resampled_sums, resampled_sizes = bootstrap_sums([sums, sizes], resamples, seed)
    low, high = percentile_interval(resampled_sums / resampled_sizes)
    return float(sums.sum() / sizes.sum()), low, high


def bootstrap_sums(
    columns: Sequence[Sequence[float] | np.ndarray], resamples: int, seed: int
) -> list[np.ndarray]:
    """For each column of P numbers, one per prompt, its (R,) sums over resampled prompts, which are
    the same for all columns.
    """
    arrays = [np.asarray(column, dtype=float) for column in columns]
    prompts = len(arrays[0])
    drawn = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
    return [array[drawn].sum(1) for array in arrays]


def percentile_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of bootstrapped values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is 0 for a single value.

    >>> mean_with_error([1.0, 3.0])
    (2.0, 1.0)
    """
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)


def corrected_mean(
    labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float]
) -> Interval | None:
    """The mean of people's outcomes over all items, from people's outcomes of few and a judge's of
    all: prediction-powered inference (Angelopoulos et al. 2023) with the weight of the judge that
    gives the narrowest interval (PPI++, 2311.01453, example 6.1). The better the judge, the more it
    narrows; a judge that is wrong in a constant way is corrected.

    Args:
        labels: (n,) outcomes by people, each 0..1, of items that were drawn at random.
        judged: (n,) outcomes of the same items by the judge.
        unlabelled: (N,) outcomes of all other items by the judge.

    Returns:
        The mean and its 95% interval, by Student's t; None with fewer than MIN_LABELS labels, of
        which the normal approximation says too little, or if all labels are alike.

    Raises:
        ValueError: the lengths of labels and judged differ.
    """
    columns = (labels, judged, unlabelled)
    people, judge, other = (np.asarray(column, dtype=float) for column in columns)
    if len(people) != len(judge):
        raise ValueError(f"{len(people)} labels of people, {len(judge)} of the judge")
    if len(people) < MIN_LABELS or np.ptp(people) == 0:
        return None
    weight, of_others = 0.0, 0.0
    if len(other) > 1 and (spread := np.var([*judge, *other], ddof=1)) > 0:
        weight = np.cov(people, judge)[0, 1] / (spread * (1 + len(people) / len(other)))
        of_others = weight**2 * np.var(other, ddof=1) / len(other)
    estimate = np.mean(people - weight * judge) + (weight * np.mean(other) if weight else 0.0)
    error = math.sqrt(np.var(people - weight * judge, ddof=1) / len(people) + of_others)
    half = float(t.ppf(0.975, len(people) - 1)) * error
    return float(estimate), float(max(0.0, estimate - half)), float(min(1.0, estimate + half))


def prompts_needed(prompts: int, rate: float, low: float, high: float) -> int | None:
    """Number of prompts at which a win rate's interval would exclude 0.5, if the rate stays.

    The half width of an interval shrinks with the square root of the number of prompts, so the
    answer is n (half width / |rate - 0.5|)^2, rounded up, and at least one more than now.

    Returns:
        The number; None if the interval excludes 0.5 already, or if the rate is 0.5.
    """
    if not low <= 0.5 <= high or rate == 0.5:
        return None
    return max(prompts + 1, math.ceil(prompts * ((high - low) / 2 / abs(rate - 0.5)) ** 2))


def calibration(margins: Sequence[float], bins: int = 10) -> tuple[float, list[Bin]]:
    """Expected calibration error of a Bradley-Terry model on pairs (Guo et al. 2017, eq. 3).

    The model's confidence in its preference is sigmoid(|margin|), in 0.5..1. The preference is
    correct if the margin is positive; 0 counts half.

    Args:
        margins: score of chosen - rejected, per pair.
        bins: number of bins of equal width.

    Returns:
        The error, and (mean confidence, share of correct pairs, number of pairs) of each bin that
        is not empty.
    """
    values = np.asarray(margins, dtype=float)
    confidence = 1 / (1 + np.exp(-np.abs(values)))
    correct = (values > 0) + 0.5 * (values == 0)
    bin_of_pair = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    rows = []
    for number in np.unique(bin_of_pair):
        inside = bin_of_pair == number
        rows.append(
            (float(confidence[inside].mean()), float(correct[inside].mean()), int(inside.sum()))
        )
    ece = sum(
        count / len(values) * abs(predicted - observed) for predicted, observed, count in rows
    )
    return ece, rows


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None if it is undefined (fewer than two points, or a constant)."""
    if len(x) < 2 or min(x) == max(x) or min(y) == max(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def partial_correlation(
    x: Sequence[float], y: Sequence[float], given: Sequence[Sequence[float]]
) -> float | None:
    """Pearson's correlation of the residuals of x and y after linear regression on `given`.

    None if it is undefined: too few points, or a residual is constant.
    """
    if len(x) < len(given) + 3:
        return None
    regressors = np.column_stack([np.ones(len(x)), *given])
    both = np.column_stack([x, y])
    residuals = both - regressors @ np.linalg.lstsq(regressors, both, rcond=None)[0]
    if (residuals.std(0) <= 1e-9 * np.abs(both).max(0)).any():
        return None
    return float(np.corrcoef(residuals.T)[0, 1])


def connected_groups(links: Sequence[tuple[Hashable, Hashable]]) -> list[list[int]]:
    """Indices of the links of each connected component, e.g. of pairs that share a text.

    >>> connected_groups([("a", "b"), ("c", "d"), ("b", "e")])
    [[0, 2], [1]]
    """
    number: dict[Hashable, int] = {}
    ends = [[number.setdefault(end, len(number)) for end in link] for link in links]
    rows, columns = np.array(ends, dtype=int).reshape(-1, 2).T
    _, labels = connected_components(
        coo_array((np.ones(len(ends)), (rows, columns)), shape=(len(number), len(number))),
        directed=False,
    )
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(int(labels[row]), []).append(index)
    return list(groups.values())
