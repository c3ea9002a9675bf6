"""What a policy's KL is worth, against hand-worked values and normal rewards."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from stages.evaluate.kl_efficiency import best_of_n_kl, kl_efficiency, rise_per_distance


def test_the_slope_is_that_of_the_line_through_the_single_sample():
    # 0.636, 1.835 nats: rises of 2 sqrt(KL) and 3 sqrt(KL)
    four, sixteen = best_of_n_kl(4), best_of_n_kl(16)
    assert (four, sixteen) == pytest.approx((0.636, 1.835), abs=1e-3)
    scores = {1: -1.0, 4: -1 + 2 * math.sqrt(four), 16: -1 + 3 * math.sqrt(sixteen)}
    expected = (2 * four + 3 * sixteen) / (four + sixteen)
    assert rise_per_distance(scores) == pytest.approx(expected)


@pytest.mark.parametrize("scores", [{1: 0.5}, {1: 0.5, 4: 0.5}])
def test_without_a_rise_there_is_no_slope(scores):
    assert rise_per_distance(scores) is None


def test_best_of_many_normal_rewards_is_on_the_line_of_few():
    """Expected highest of n standard normal rewards, by numerical integration."""
    normal = NormalDist()
    grid = np.linspace(1e-6, 1 - 1e-6, 200_001)
    quantiles = np.array([normal.inv_cdf(u) for u in grid])
    highest = {n: float(np.mean(quantiles * n * grid ** (n - 1))) for n in (1, 4, 16, 256)}
    slope = rise_per_distance({n: highest[n] for n in (1, 4, 16)})
    assert (highest[256] / slope) ** 2 / best_of_n_kl(256) == pytest.approx(1, abs=0.05)


def test_by_hand():
    # (3 / 1.5) ** 2 = 4 nats would do; the policy has 8
    value, low, high = kl_efficiency([2.0, 4.0] * 20, [6.0, 10.0] * 20, 1.5, 500, 0)
    assert value == pytest.approx(0.5) and 0.4 < low < 0.5 < high < 0.6


def test_a_reward_that_falls_is_worth_nothing():
    assert kl_efficiency([-1.0, -2.0], [5.0, 6.0], 1.0, 100, 0) == (0.0, 0.0, 0.0)
