"""A round whose policy is trained by an algorithm other than PPO."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.lib.core.params import Params, check_params

SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 2,
    "total_episodes": 16,
    "save_updates": 2,
    "max_kl_per_token": 1000.0,
}


@pytest.fixture
def make_params(make_round) -> Callable[..., Params]:
    """A round without a policy; `section`: keys of the algorithm's section, `ppo`: of `ppo`."""

    def make(algorithm: str, section: dict | None = None, **ppo: object) -> Params:
        params = make_round("r0", 1.0).model_dump()
        shutil.rmtree(Path("rounds/r0/ppo"))
        sections = {} if algorithm == "ppo" else {algorithm: params[algorithm] | (section or {})}
        return check_params(
            params | {"algorithm": algorithm, "ppo": params["ppo"] | SHORT | ppo} | sections, "test"
        )

    return make
