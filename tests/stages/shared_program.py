"""The stages that several processes share, in as many as params.yaml says: the alternatives to PPO,
whose outputs go to rounds/<algorithm>, then with the policy in the folder `ppo` the other stages.
"""

import os
import shutil
import sys
from importlib import import_module
from typing import Any

from stages.lib.core.launch import rank
from stages.lib.core.params import SHARED, Params, check_params, load_params
from stages.lib.core.processes import share_out
from stages.lib.lm import world
from stages.ppo.__main__ import main as policy
from tests.stages.ppo.alternatives.kill import SECTIONS

OTHER_STAGES = [stage for stage in SHARED if stage != "ppo"]


def refuse_to_write(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no file of the project is opened for writing."""
    writes = event == "open" and {*str(arguments[1])} & {*"wax+"}
    if writes and not str(arguments[0]).startswith("/"):
        raise PermissionError(f"{arguments[0]} is written by the first process")


def alternative(params: Params, algorithm: str) -> Params:
    """A few updates of two epochs, in micro-batches of 3 episodes."""
    values = params.model_dump(mode="json") | {"algorithm": algorithm}
    values[algorithm] |= SECTIONS[algorithm]
    values["ppo"] |= {"batch_size": 6, "mini_batch_size": 6, "micro_batch_size": 3}
    values["ppo"] |= {"total_episodes": 12, "num_ppo_epochs": 2, "max_kl_per_token": 1000.0}
    values["ppo"]["max_steps"] = 4
    # a rate at which ratios are clipped
    values["ppo"] |= {"on_danger": "warn", "validation_updates": 1, "learning_rate": 0.01}
    return check_params(values, algorithm)


def main() -> None:
    params = load_params()
    share_out("tests.stages.shared_program", [], params, "evaluate", "r0")
    if rank():
        sys.addaudithook(refuse_to_write)
    for algorithm in SECTIONS:
        policy(alternative(params, algorithm), "r0")
        if world.is_main():
            os.rename("rounds/r0/ppo", f"rounds/{algorithm}")
    if world.is_main():
        shutil.copytree("ppo", "rounds/r0/ppo")
    world.wait()
    for stage in OTHER_STAGES:
        import_module(f"stages.{stage}.__main__").main(params, "r0")


if __name__ == "__main__":
    main()
