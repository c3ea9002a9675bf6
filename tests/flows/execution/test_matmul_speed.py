"""Tests of what the measurement of a machine says beside its speed."""

import pytest

from flows.execution.matmul_speed import device_limits


@pytest.mark.parametrize(
    ("device", "limits"),
    [
        ("cpu", {"piece": 2**26, "cache": 2**29, "tokens": 2**12}),
        ("cuda", {"piece": 2**27, "cache": 20e9, "tokens": 2**15}),
    ],
)
def test_pieces_and_caches_are_those_of_the_device(device, limits):
    assert device_limits(device, 80e9) == limits
