"""What `ppo.rewards` names on this disk; light to import, so that a run can ask before it starts,
hours before PPO does.
"""

import inspect
from pathlib import Path

from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.user_functions import import_function


def reward_source_files(params: Params) -> list[Path]:
    """Folders of the reward models and files of the reward functions.

    Raises:
        BadInput: one of them is not there.
    """
    found = []
    for source in params.ppo.rewards:
        if source.model:
            found.append(Path(source.model))
            if not (found[-1] / "config.json").exists():
                raise BadInput(
                    f"ppo.rewards {source.name}: no model in {source.model}; name a folder that has a config.json"
                )
        if source.function and (
            file := inspect.getsourcefile(
                import_function(source.function, f"ppo.rewards {source.name}")
            )
        ):
            found.append(Path(file))
    return found
