"""The drop from SFT to policy, against hand-worked values."""

import math

import pytest

from stages.capability.measure import paired_drop, regression_metrics


def test_of_ten_pairs_by_hand():
    # 3 lost, 1 won, 6 alike; with one more of each the 12 differences have mean 2/12 and mean
    # square 6/12
    before, after = [1, 1, 1, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    mean, half = 2 / 12, 1.959964 * math.sqrt((6 / 12 - (2 / 12) ** 2) / 12)
    assert paired_drop(before, after) == pytest.approx((0.2, mean - half, mean + half), abs=1e-6)


def test_few_pairs_that_agree_decide_nothing_and_many_do():
    widths = {n: paired_drop([1.0] * n, [1.0] * n)[2] for n in (1, 5, 30, 250)}
    # 1.96 sqrt(2 / (n + 2)) / sqrt(n + 2)
    assert widths == pytest.approx({n: 1.959964 * math.sqrt(2) / (n + 2) for n in widths}, abs=1e-6)
    assert widths[5] > 0.1 > widths[30]


def test_all_lost():
    metrics = regression_metrics([1.0] * 4, [0.0] * 4)
    keys = ("prompts", "sft", "policy", "fall", "fall_high")
    assert [metrics[key] for key in keys] == [4, 1.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="at least one pair"):
        paired_drop([], [])
