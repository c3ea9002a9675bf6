"""How far optimisation can go before the judge's score falls.

Gao, Schulman & Hilton 2023, "Scaling laws for reward model overoptimization": under reinforcement
learning the gold reward, relative to the start of optimisation, is R(d) = d (alpha - beta log d) at
the distance d = sqrt(KL). R'(d) = alpha - beta - beta log d, so for beta > 0 the maximum is at
d = exp(alpha / beta - 1).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_POINTS = 3  # two coefficients, and one degree of freedom for the error
MAX_EXTRAPOLATION = 2  # times the largest measured KL: a peak further away is a guess


class Point(NamedTuple):
    """A policy after `update` PPO updates.

    kl: nats per sequence from SFT. proxy: calibrated reward score; None without a reward model.
    gold: the judge score.
    """

    update: int
    kl: float
    proxy: float | None
    gold: float


def distance(kl: float) -> float:
    """d = sqrt(KL), in sqrt(nats); 0 if KL, which is estimated from samples, is below 0."""
    return math.sqrt(max(kl, 0.0))


def overoptimisation(points: Sequence[Point]) -> dict[str, float | None]:
    """Fit the law to the gain of gold over SFT by least squares, and report the measured peak.

    Args:
        points: SFT first.

    Returns:
        `points`: the number of points with d > 0; only these determine the fit. `alpha`, `beta`,
        `rmse` (over these points, in units of gold): null if there are fewer than 3, or all are at
        one distance. `peak_kl`: of the fit; null if it has no maximum, or only beyond twice the
        largest measured KL. `measured_peak_*`: the point with the highest gold, SFT included.
        `gold_after_peak`, `proxy_after_peak`: the change from that point to the one with the
        largest KL; gold falling while the proxy rises is over-optimisation. Null without a proxy.
    """
    best = max(points, key=lambda point: point.gold)
    furthest = max(points, key=lambda point: point.kl)
    fitted = [point for point in points if distance(point.kl)]
    gains = [point.gold - points[0].gold for point in fitted]
    coefficients = fit_law([distance(point.kl) for point in fitted], gains)
    alpha, beta, rmse = coefficients or (None, None, None)
    peak = None
    if coefficients:
        peak = peak_kl(coefficients[0], coefficients[1], MAX_EXTRAPOLATION * furthest.kl)
    return {
        "alpha": alpha,
        "beta": beta,
        "rmse": rmse,
        "points": len(fitted),
        "peak_kl": peak,
        "measured_peak_kl": best.kl,
        "measured_peak_update": best.update,
        "gold_after_peak": furthest.gold - best.gold,
        "proxy_after_peak": None
        if furthest.proxy is None or best.proxy is None
        else furthest.proxy - best.proxy,
    }


def fit_law(
    distances: Sequence[float], gains: Sequence[float]
) -> tuple[float, float, float] | None:
    """(alpha, beta, root mean squared error) of d (alpha - beta log d), which is linear in both.

    None if the points do not determine them.
    """
    if len(distances) < MIN_POINTS:
        return None
    d = np.asarray(distances, dtype=float)
    columns = np.column_stack([d, -d * np.log(d)])
    solution, _, rank, _ = np.linalg.lstsq(columns, np.asarray(gains, dtype=float), rcond=None)
    if rank < 2:
        return None
    rmse = float(np.sqrt(np.mean((columns @ solution - gains) ** 2)))
    return float(solution[0]), float(solution[1]), rmse


def peak_kl(alpha: float, beta: float, largest: float) -> float | None:
    """The KL (nats) at which d (alpha - beta log d) is highest.

    None if it has no maximum, or only beyond `largest`.
    """
    if beta <= 0:
        return None
    # compared as a logarithm: for a small beta the KL itself would overflow
    log_kl = 2 * (alpha / beta - 1)
    return math.exp(log_kl) if log_kl <= math.log(largest) else None
