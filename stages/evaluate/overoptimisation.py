"""How far optimisation could go before the judge liked it less.

Gao, Schulman & Hilton 2023, "Scaling laws for reward model overoptimization": under reinforcement
learning the gold reward, relative to where optimisation starts, is R(d) = d (alpha - beta log d) at
the distance d = sqrt(KL). R'(d) = alpha - beta - beta log d, so that for beta > 0 it is highest at
d = exp(alpha / beta - 1), and falls after.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST = 3  # points, for two coefficients
BEYOND = 2  # times the largest measured KL: a peak that is further away is a guess


class Point(NamedTuple):
    """A policy after `update` PPO updates. kl: nats a sequence from SFT. proxy: calibrated
    reward-model score. gold: judged sentiment.
    """

    update: int
    kl: float
    proxy: float
    gold: float


def distance(kl: float) -> float:
    """d = sqrt(KL), in sqrt(nats); 0 where an estimate of KL from samples falls below 0."""
    return math.sqrt(max(kl, 0.0))


def overoptimisation(points: Sequence[Point]) -> dict[str, float | None]:
    """The law, fitted by least squares to the points' gain of gold over SFT, and what was measured.

    points: SFT first. `points` counts those that are away from SFT (d > 0), which alone decide the
    fit; `rmse` is over them, in units of gold. alpha, beta, rmse are null where they are fewer than
    3 or all at one distance. peak_kl is the fit's; null where it has none, or has it beyond twice
    the largest measured KL. measured_peak_*: of the point with the highest gold, SFT included.
    *_after_peak: what gold and proxy change by from there to the largest KL; gold down while the
    proxy goes up is over-optimisation.
    """
    best, furthest = (
        max(points, key=lambda point: point.gold),
        max(points, key=lambda point: point.kl),
    )
    away = [point for point in points if distance(point.kl)]
    coefficients = fit(
        [distance(point.kl) for point in away], [point.gold - points[0].gold for point in away]
    )
    alpha, beta, rmse = coefficients or (None, None, None)
    return {
        "alpha": alpha,
        "beta": beta,
        "rmse": rmse,
        "points": len(away),
        "peak_kl": peak_kl(coefficients[0], coefficients[1], BEYOND * furthest.kl)
        if coefficients
        else None,
        "measured_peak_kl": best.kl,
        "measured_peak_update": best.update,
        "gold_after_peak": furthest.gold - best.gold,
        "proxy_after_peak": furthest.proxy - best.proxy,
    }


def fit(distances: Sequence[float], gains: Sequence[float]) -> tuple[float, float, float] | None:
    """(alpha, beta, root mean squared error) of d (alpha - beta log d), linear in both; None where
    the points do not determine them.
    """
    if len(distances) < FEWEST:
        return None
    d = np.asarray(distances, dtype=float)
    columns = np.column_stack([d, -d * np.log(d)])
    solution, _, rank, _ = np.linalg.lstsq(columns, np.asarray(gains, dtype=float), rcond=None)
    if rank < 2:
        return None
    return (
        float(solution[0]),
        float(solution[1]),
        float(np.sqrt(np.mean((columns @ solution - gains) ** 2))),
    )


def peak_kl(alpha: float, beta: float, largest: float) -> float | None:
    """The KL, nats, at which d (alpha - beta log d) is highest; None where it has no maximum, or
    has it beyond `largest`.
    """
    if beta <= 0:
        return None
    log_kl = 2 * (
        alpha / beta - 1
    )  # compared as it is: the exponential of a slight beta's has no float
    return math.exp(log_kl) if log_kl <= math.log(largest) else None
