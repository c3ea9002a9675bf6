"""What `ppo.rewards` names on this disk; light to import, so that a run can ask before it starts, hours before PPO does."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stages.errors import BadInput
from stages.params import Params, RewardSource
from stages.prompts import Prompt

Reward = Callable[[Sequence[Prompt], Sequence[str]], list[float]]


def load_function(source: RewardSource) -> Reward:
    """
    Raises:
        BadInput: there is no such module, or no such function in it.
    """
    if os.getcwd() not in sys.path:  # of a script of .venv/bin it is not
        sys.path.insert(0, os.getcwd())
    module, _, name = (source.function or "").partition(":")
    try:
        reward: Reward = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"ppo.rewards {source.name}: {source.function} cannot be imported ({error}); put the module in the project's folder"
        ) from None
    return reward


def files(params: Params) -> list[Path]:
    """Folders of the reward models and files of the reward functions.

    Raises:
        BadInput: one of them is not there.
    """
    found = []
    for source in params.ppo.rewards:
        if source.model:
            found.append(Path(source.model))
            if not (found[-1] / "config.json").exists():
                raise BadInput(f"ppo.rewards {source.name}: no model in {source.model}; name a folder that has a config.json")
        if source.function and (file := inspect.getsourcefile(load_function(source))):
            found.append(Path(file))
    return found
