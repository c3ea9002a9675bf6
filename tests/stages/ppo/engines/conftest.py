"""A round whose policy the stand-in of an engine trains, on Ray's stand-in or on a real cluster."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.lib.core.params import Params, check_params
from stages.lib.core.ray import job
from stages.lib.core.types import Metrics
from stages.ppo.engines import JOBS
from tests.engine_settings import NEEDED
from tests.ray_cluster import RealCluster, real_or_stand_in, start_real
from tests.ray_stand_in import RayStandIn
from tests.stages.ppo.engines.jobs import install

SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 2,
    "total_episodes": 20,
    "validation_updates": 2,
    "learning_rate": 0.01,
    "max_kl_per_token": 1000.0,
    "kl_coef": 0.05,
    "score_clip": 3.0,
}


@pytest.fixture(scope="session")
def engine_environment(tmp_path_factory) -> dict[str, str]:
    """Variables with which OpenRLHF's command is the stand-in."""
    folder = tmp_path_factory.mktemp("engine")
    install(folder, openrlhf=JOBS["openrlhf"].version)
    return {
        "PYTHONPATH": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="session")
def real_cluster(engine_environment) -> Iterator[RealCluster | None]:
    """A real one, for `make test-engines`, whose `python3` is that of Ray's environment."""
    without_path = {name: value for name, value in engine_environment.items() if name != "PATH"}
    yield from start_real(without_path)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch) -> None:
    """For the tests' time; jobs take seconds here."""
    monkeypatch.setattr(job, "POLL_SECONDS", 0.2)


@pytest.fixture
def ray(engine_environment, real_cluster) -> Iterator[RealCluster | RayStandIn]:
    """A cluster with `address`."""
    yield from real_or_stand_in(real_cluster, engine_environment)


@pytest.fixture
def make_params(make_round) -> Callable[..., Params]:
    """A round without a policy, to be trained on the cluster at an address."""

    def make(address: str, options: Metrics | None = None, **ppo: Any) -> Params:
        params = json.loads(make_round("r0", 1.0).model_dump_json())
        shutil.rmtree(Path("rounds/r0/ppo"))
        launcher = {"ray_address": address, "gpus_per_node": 2}
        section = params["ppo"] | NEEDED | SHORT | {"engine_options": options or {}} | ppo
        return check_params(params | {"ppo": section, "launcher": launcher}, "test")

    return make
