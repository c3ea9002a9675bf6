"""The over-optimisation curve, against hand-worked values and scipy."""

import math

import pytest
from scipy.optimize import curve_fit, minimize_scalar

from stages.evaluate.overoptimisation import Point, distance, fit_law, overoptimisation, peak_kl

SFT = Point(0, 0.0, -1.0, 0.2)


def law(d, alpha, beta):
    from numpy import log

    return d * (alpha - beta * log(d))


def on_the_law(alpha: float, beta: float, distances: list[float]) -> list[Point]:
    return [
        SFT,
        *(
            Point(n, d * d, float(n), SFT.gold + law(d, alpha, beta))
            for n, d in enumerate(distances, 1)
        ),
    ]


def test_points_on_the_law_give_its_coefficients_and_peak_by_hand():
    # d = e^(alpha / beta - 1) = e^(1/2 - 1), so KL = 1 / e; R(1) = 0.5, R(2) = 1 - 2 log 2
    result = overoptimisation(
        [
            SFT,
            Point(2, 1.0, 0.0, 0.7),
            Point(4, 4.0, 2.0, 0.2 + 1 - 2 * math.log(2)),
            Point(1, 1 / math.e, -0.5, 0.2 + math.exp(-0.5)),
        ]
    )
    assert (result["alpha"], result["beta"]) == pytest.approx((0.5, 1.0))
    assert result["rmse"] == pytest.approx(0.0, abs=1e-12)
    assert result["points"] == 3 and result["peak_kl"] == pytest.approx(1 / math.e)
    # the highest gold is measured at this KL, by update 1; from there to KL 4 gold falls and the
    # proxy rises: over-optimisation
    assert (result["measured_peak_kl"], result["measured_peak_update"]) == (1 / math.e, 1)
    assert result["gold_after_peak"] == pytest.approx(1 - 2 * math.log(2) - math.exp(-0.5))
    assert result["gold_after_peak"] < 0
    assert result["proxy_after_peak"] == 2.5


def test_noisy_points_agree_with_scipy():
    distances, gains = [0.6, 1.1, 1.7, 2.2, 2.9], [0.22, 0.31, 0.43, 0.36, 0.33]
    fitted = fit_law(distances, gains)
    (alpha, beta), *_ = curve_fit(law, distances, gains)
    errors = [gain - law(d, alpha, beta) for d, gain in zip(distances, gains, strict=True)]
    rmse = math.sqrt(sum(error**2 for error in errors) / 5)
    assert fitted == pytest.approx((alpha, beta, rmse), rel=1e-5) and rmse > 0.01
    highest = minimize_scalar(
        lambda d: -law(d, alpha, beta), bounds=(0.01, 10), method="bounded", options={"xatol": 1e-9}
    )
    assert peak_kl(fitted[0], fitted[1], 100.0) == pytest.approx(highest.x**2, rel=1e-4)


def test_a_peak_far_beyond_the_measured_kl_is_not_reported():
    # alpha 2, beta 1: d = e, KL = e^2 = 7.39; measured up to 3.8 it lies within twice that, up to
    # 3.6 it does not
    result = overoptimisation(on_the_law(2, 1, [0.5, 1.0, math.sqrt(3.8)]))
    assert result["peak_kl"] == pytest.approx(math.e**2)
    result = overoptimisation(on_the_law(2, 1, [0.5, 1.0, math.sqrt(3.6)]))
    assert result["peak_kl"] is None and result["alpha"] == pytest.approx(2)
    # no maximum, or one whose KL is too large for a float
    assert peak_kl(0.3, 0.0, 10.0) is None
    assert peak_kl(0.3, -0.1, 10.0) is None
    assert peak_kl(1.0, 1e-6, 10.0) is None


def test_too_few_points_give_no_fit_but_the_measured_peak():
    result = overoptimisation(
        [SFT, Point(3, 1.0, 0.0, 0.5), Point(6, 2.0, 0.0, 0.4), Point(9, -0.01, 0.0, 0.1)]
    )
    assert result["points"] == 2
    assert [result[name] for name in ("alpha", "beta", "rmse", "peak_kl")] == [None] * 4
    assert (result["measured_peak_kl"], result["measured_peak_update"]) == (1.0, 3)


def test_points_at_one_distance_determine_nothing():
    assert fit_law([1.5, 1.5, 1.5], [0.1, 0.2, 0.3]) is None


def test_if_nothing_is_better_than_sft_the_peak_is_sft():
    result = overoptimisation([SFT, *(Point(n, float(n), 0.0, 0.2 - 0.1 * n) for n in (1, 2, 3))])
    assert (result["measured_peak_kl"], result["measured_peak_update"]) == (0.0, 0)
    assert result["gold_after_peak"] == pytest.approx(-0.3) and result["proxy_after_peak"] == 1.0


def test_an_estimate_of_kl_below_zero_is_no_distance():
    assert distance(-0.2) == 0.0 and distance(6.25) == 2.5
