"""The files that `ppo.rewards` names; light to import, so that a run can check them at its start,
hours before PPO needs them.
"""

import inspect
from pathlib import Path

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.user_functions import import_function


def reward_source_files(params: Params) -> list[Path]:
    """The folders of the reward models and the files of the reward functions.

    Raises:
        BadInput: one of them does not exist.
    """
    paths = []
    for source in params.ppo.rewards:
        key = f"ppo.rewards {source.name}"
        if source.model:
            folder = Path(source.model)
            paths.append(folder)
            if not (folder / "config.json").exists():
                raise BadInput(
                    f"{key}: no model in {source.model}; name a folder that has a config.json"
                )
        if source.function and (
            file := inspect.getsourcefile(import_function(source.function, key))
        ):
            paths.append(Path(file))
    return paths
