"""A Ray cluster: a real one for `make test-engines`, else Ray's stand-in."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import RealCluster, real_or_stand_in, start_real
from tests.ray_stand_in import RayStandIn


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[RealCluster | None]:
    yield from start_real({})


@pytest.fixture
def ray(real_cluster: RealCluster | None) -> Iterator[RealCluster | RayStandIn]:
    yield from real_or_stand_in(real_cluster, {})
