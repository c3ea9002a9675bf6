"""Short runs of each algorithm, and an end at a chosen call, as a kill of the process would be."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.lib.core.params import Params
from stages.ppo.__main__ import main

FOLDER = Path("rounds/r0/ppo")
# best_of_n: epochs of two updates. So the state after the second update is saved at the end of an
# epoch, and that after the third within one.
SECTIONS = {
    "best_of_n": {"n": 2, "per_device_train_batch_size": 2, "num_train_epochs": 3},
    "dpo": {"per_device_train_batch_size": 5, "num_train_epochs": 2},
    "rloo": {"num_generations": 2},
    "grpo": {"num_generations": 2},
}


class Killed(BaseException):
    """Ends a process as a kill does: nothing handles it."""


def killed_before(count: int, owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    """Let the `count`-th call of a method of `owner` kill the process."""
    method, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return method(*args, **kwargs)

    patch.setattr(owner, name, call)


def run_killed(params: Params, moment: tuple[int, type, str], patch: pytest.MonkeyPatch) -> None:
    """Run the stage until it is killed; its outputs are then deleted, as DVC does."""
    with patch.context() as within, pytest.raises(Killed):
        killed_before(*moment, within)
        main(params, "r0")
    shutil.rmtree(FOLDER)
