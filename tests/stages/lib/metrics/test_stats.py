"""Intervals and calibration, against hand calculation and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from stages.lib.metrics.stats import (
    calibration,
    connected_groups,
    corrected_mean,
    mean_with_error,
    paired_bootstrap,
    partial_correlation,
    pearson,
    prompts_needed,
    wilson_interval,
    with_interval,
)


def test_the_names_of_a_mean_and_its_interval():
    assert with_interval("rise", (0.5, 0.4, 0.7)) == {
        "rise": 0.5,
        "rise_low": 0.4,
        "rise_high": 0.7,
    }


def test_wilson_by_hand():
    # p = .5, n = 10, z = 1.96: (.5 + .19208 -+ 1.96 * sqrt(.025 + .009604)) / 1.38416
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_wilson_at_the_edge_has_a_width():
    low, high = wilson_interval(20, 20)
    # (1 + .09604 - 1.96 * sqrt(.002401)) / 1.19208 = 1 / 1.19208
    assert (low, high) == pytest.approx((0.83887, 1.0), abs=1e-5)


def test_wilson_of_one_trial_and_of_another_level():
    # p = 1, n = 1: 1 / (1 + z^2), with z = 1.96 and z = 1
    assert wilson_interval(1, 1) == pytest.approx((0.20654, 1.0), abs=1e-5)
    assert wilson_interval(1, 1, z=1.0) == pytest.approx((0.5, 1.0), abs=1e-9)


def test_wilson_needs_trials():
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, 0)


def test_bootstrap_agrees_with_scipy():
    values = np.random.default_rng(0).normal(0.3, 1.0, 200)
    mean, low, high = paired_bootstrap([[v] for v in values], 20_000, seed=1)
    scipy_interval = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=2
    ).confidence_interval
    assert mean == pytest.approx(values.mean())
    # with 20,000 resamples, an end of this interval (width 0.28) varies by about 0.002
    assert (low, high) == pytest.approx((scipy_interval.low, scipy_interval.high), abs=0.008)


def test_the_interval_has_95_percent_by_hand():
    # A resample of 8 prompts has Binomial(8, 1/4) ones: 5 or more with a probability of 2.7%, more
    # than 2.5% and less than 3%; with 1/4 zeros, 3 or fewer ones
    _, _, high = paired_bootstrap([[1.0]] * 2 + [[0.0]] * 6, 100_000, seed=0)
    _, low, _ = paired_bootstrap([[1.0]] * 6 + [[0.0]] * 2, 100_000, seed=0)
    assert (low, high) == (3 / 8, 5 / 8)


def test_more_samples_of_the_same_prompts_do_not_narrow_the_interval():
    values = np.random.default_rng(0).normal(size=50)
    one = paired_bootstrap([[v] for v in values], 2000, seed=3)
    five = paired_bootstrap([[v] * 5 for v in values], 2000, seed=3)
    assert five == pytest.approx(one)


def test_prompts_of_unequal_size_weigh_by_their_samples():
    mean, _, _ = paired_bootstrap([[1.0, 1.0, 1.0], [0.0]], 100, seed=0)
    assert mean == 0.75


def test_bootstrap_refuses_empty_clusters():
    with pytest.raises(ValueError, match="at least one prompt"):
        paired_bootstrap([], 100, 0)
    with pytest.raises(ValueError, match="a value for each"):
        paired_bootstrap([[1.0], []], 100, 0)


def test_prompts_needed_by_hand():
    # a half width of 0.1 has to shrink to 0.05, the distance of the rate from 0.5: to a half, so
    # 4 times the prompts; to 0.03: 100 / 9 times
    assert prompts_needed(100, 0.55, 0.45, 0.65) == 400
    assert prompts_needed(88, 0.47, 0.37, 0.57) == 978  # 977.8
    # just undecided, with an asymmetric interval: never fewer than now
    assert prompts_needed(88, 0.6, 0.5, 0.65) == 89
    assert prompts_needed(88, 0.4, 0.35, 0.5) == 89


@pytest.mark.parametrize(
    ("rate", "low", "high"), [(0.7, 0.51, 0.8), (0.3, 0.2, 0.49), (0.5, 0.4, 0.6)]
)
def test_no_number_of_prompts_if_decided_or_at_one_half(rate: float, low: float, high: float):
    assert prompts_needed(100, rate, low, high) is None


def test_mean_with_error():
    values = [1.0, 2.0, 4.0, 3.0]
    assert mean_with_error(values) == pytest.approx((2.5, stats.sem(values)))
    assert mean_with_error([1.5]) == (1.5, 0.0)


def test_calibration_by_hand():
    # confidence sigmoid(ln 3) = .75 with 3 of 4 right: calibrated; sigmoid(ln 19) = .95 with 1 of 2
    # right: off by .45
    margins = [math.log(3)] * 3 + [-math.log(3)] + [math.log(19), -math.log(19)]
    ece, bins = calibration(margins)
    assert bins == [(pytest.approx(0.75), 0.75, 4), (pytest.approx(0.95), 0.5, 2)]
    assert ece == pytest.approx(2 / 6 * 0.45)


def test_bins_of_confidence_are_a_twentieth_wide():
    # .53 and right, .58 and wrong: in one bin, they would be off by .055 only
    ece, bins = calibration([math.log(0.53 / 0.47), -math.log(0.58 / 0.42)])
    assert len(bins) == 2
    assert ece == pytest.approx((0.47 + 0.58) / 2)


def test_bins_begin_at_confidence_one_half():
    # with 2 bins, .5 to .75 and .75 to 1: .6, .7 and .9, all right
    margins = [math.log(p / (1 - p)) for p in (0.6, 0.7, 0.9)]
    ece, bins = calibration(margins, bins=2)
    assert bins == [(pytest.approx(0.65), 1.0, 2), (pytest.approx(0.9), 1.0, 1)]
    assert ece == pytest.approx(2 / 3 * 0.35 + 1 / 3 * 0.1)
    # by default 10 bins: .945 and .955 are on two sides of the border at .95
    nearly = [math.log(p / (1 - p)) for p in (0.945, 0.955)]
    assert [count for _, _, count in calibration(nearly)[1]] == [1, 1]
    # the last bin takes 1 itself, and no other of its neighbours
    assert [count for _, _, count in calibration([*nearly, 100.0])[1]] == [1, 2]


def test_calibration_counts_ties_half():
    assert calibration([0.0, 0.0]) == (0.0, [(0.5, 0.5, 2)])


def test_certain_margins_fall_in_the_last_bin():
    assert calibration([100.0, 100.0]) == (0.0, [(1.0, 1.0, 2)])


def test_pearson():
    x, y = [1.0, 2.0, 4.0, 3.0], [2.0, 1.0, 5.0, 4.0]
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert pearson(x, [1.0] * 4) is None
    assert pearson([1.0], [1.0]) is None
    assert pearson([1.0, 2.0], [5.0, 3.0]) == pytest.approx(-1.0)
    assert pearson([1.0, 1.0], [5.0, 3.0]) is None


def test_partial_correlation_equals_that_of_the_inverse_covariance():
    """-P_xy / sqrt(P_xx P_yy), the other definition (Whittaker 1990), which needs no regression."""
    z, w, e, f = np.random.default_rng(0).normal(size=(4, 300))
    x, y = 2 * z + e, 3 * z - w + 0.5 * e + f
    precision = np.linalg.inv(np.cov([x, y, z, w]))
    expected = -precision[0, 1] / math.sqrt(precision[0, 0] * precision[1, 1])
    assert partial_correlation(x, y, [z, w]) == pytest.approx(expected)
    assert 0.3 < expected < 0.6 < pearson(x, y)


def test_partial_correlation_without_residuals_is_undefined():
    x, z = [1.0, 2.0, 3.0, 5.0], [2.0, 4.0, 6.0, 10.0]
    assert partial_correlation(x, [1.0, 0.0, 2.0, 1.0], [z]) is None
    assert (
        partial_correlation([1.0, 2.0, 4.0], [3.0, 1.0, 2.0], [[1.0, 0.0, 1.0]]) is None
    )  # three points, two of them used up


def test_partial_correlation_of_as_few_points_as_it_can_have():
    # four points, one regressor; z = (0, 0, 1, 1) leaves the differences from the mean of each
    # half: x (-1, 1, -2, 2), y (1, -1, -3, 3): (-1 - 1 + 6 + 6) / sqrt(10 * 20)
    x, y = [0.0, 2.0, 5.0, 9.0], [4.0, 2.0, 1.0, 7.0]
    expected = 10 / math.sqrt(200)
    assert partial_correlation(x, y, [[0.0, 0.0, 1.0, 1.0]]) == pytest.approx(expected)


def test_a_small_column_beside_a_large_one_has_residuals():
    """Each column is compared with rounding of its own size. Residuals: x (-1, 1, -1.5, 1.5) e-6, y
    (1, -1, -3, 3) e6.
    """
    x, z = [1e-6, 3e-6, 2e-6, 5e-6], [0.0, 0.0, 1.0, 1.0]
    y = [4e6, 2e6, 1e6, 7e6]
    assert partial_correlation(x, y, [z]) == pytest.approx(7 / math.sqrt(6.5 * 20))
    # and 2 * z is none but rounding, at any size
    assert partial_correlation([2e9 * value for value in z], y, [z]) is None


def test_connected_links_are_grouped():
    links = [("a", "b"), ("c", "d"), ("b", "e"), ("f", "c"), ("g", "h")]
    assert connected_groups(links) == [[0, 2], [1, 3], [4]]
    assert connected_groups([("a", "a")]) == [[0]]
    # the direction of a link means nothing
    assert connected_groups([("a", "b"), ("c", "b"), ("c", "d")]) == [[0, 1, 2]]
    assert connected_groups([]) == []


def test_a_mean_corrected_by_people_without_a_judge_that_helps() -> None:
    """A judge whose votes are all alike: Student's interval of people's outcomes alone."""
    labels = [1.0] * 15 + [0.0] * 5
    interval = corrected_mean(labels, [1.0] * 20, [1.0] * 50)
    expected = stats.ttest_1samp(labels, 0).confidence_interval(0.95)
    assert interval == pytest.approx((0.75, expected.low, expected.high))


def test_a_judge_that_is_right_narrows_the_interval() -> None:
    """With votes that are people's outcomes, the interval is that of 80 labels instead of 20."""
    labels, others = [1.0, 0.0] * 10, [1.0, 0.0] * 30
    alone = corrected_mean(labels, [1.0] * 20, others)
    helped = corrected_mean(labels, labels, others)
    assert alone is not None and helped is not None
    assert helped[0] == pytest.approx(0.5)
    widths = [high - low for _, low, high in (helped, alone)]
    assert widths[0] == pytest.approx(widths[1] / 2, rel=0.02)


def test_corrected_means_cover_the_truth() -> None:
    """1,000 simulations: 60 labels, 100 other items, and a judge that is wrong in 30% of them, more
    often for the second response.
    """
    generator, covered, truth = np.random.default_rng(0), 0, 0.62
    for _ in range(1000):
        people = (generator.random(160) < truth).astype(float)
        wrong = generator.random(160) < np.where(people == 1, 0.2, 0.4)
        judge = np.where(wrong, 1 - people, people)
        interval = corrected_mean(people[:60].tolist(), judge[:60].tolist(), judge[60:].tolist())
        assert interval is not None
        covered += interval[1] <= truth <= interval[2]
    assert 930 <= covered <= 970


def test_too_few_labels_or_none_that_differ_give_no_corrected_mean() -> None:
    assert corrected_mean([1.0, 0.0] * 9, [1.0, 0.0] * 9, [1.0]) is None
    assert corrected_mean([1.0] * 30, [1.0, 0.0] * 15, [1.0]) is None
    with pytest.raises(ValueError, match="30 labels"):
        corrected_mean([1.0] * 30, [1.0], [1.0])
