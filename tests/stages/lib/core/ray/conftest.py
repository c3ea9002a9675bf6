"""A Ray cluster: a real one for `make test-engines`, else Ray's stand-in."""

from collections.abc import Iterator

import pytest

from tests.ray_cluster import PROGRAMS, RealCluster
from tests.ray_stand_in import RayStandIn


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[RealCluster | None]:
    cluster = RealCluster(2, {}) if PROGRAMS else None
    yield cluster
    if cluster:
        cluster.close()


@pytest.fixture
def ray(real_cluster: RealCluster | None) -> Iterator[RayStandIn | RealCluster]:
    if real_cluster:
        yield real_cluster
        return
    server = RayStandIn({})
    yield server
    server.close()
