"""Ended rounds: they have left params.yaml, and nothing runs their stages again.

flows/execution/history.py ends a round. In rounds/<round>, params.yaml has the settings of its
stages, stages.lock their entries of dvc.lock, and dvc.yaml names its metrics. DVC tracks its
outputs as data, in rounds/<round>.dvc.
"""

from pathlib import Path

from stages.lib.core.files import ROUNDS
from stages.lib.core.params import Params, load_params
from stages.lib.core.params.data import RoundParams


def settings_path(round_: str) -> Path:
    return ROUNDS / round_ / "params.yaml"


def lock_path(round_: str) -> Path:
    return ROUNDS / round_ / "stages.lock"


def metrics_path(round_: str) -> Path:
    return ROUNDS / round_ / "dvc.yaml"


def data_path(round_: str) -> Path:
    return ROUNDS / f"{round_}.dvc"


def files_of(round_: str) -> tuple[Path, ...]:
    """What an ended round has besides its outputs."""
    return settings_path(round_), lock_path(round_), metrics_path(round_), data_path(round_)


def ended_names() -> list[str]:
    """The names of the ended rounds, in no order."""
    return [path.parent.name for path in ROUNDS.glob("*/params.yaml")]


def has_ended(round_: str) -> bool:
    """False also for a name that is no folder of rounds/, such as `../elsewhere`."""
    return round_ in ended_names()


def ended_rounds() -> dict[str, RoundParams]:
    """The ended rounds by name, each after its predecessor.

    Raises:
        BadInput: the settings of one of them cannot be read.
    """
    by_name = {name: load_params(settings_path(name)).rounds[name] for name in ended_names()}

    def position(name: str) -> tuple[int, str]:
        previous = Path(by_name[name].previous).name
        return (position(previous)[0] + 1 if previous in by_name else 0), name

    return {name: by_name[name] for name in sorted(by_name, key=position)}


def params_of(round_: str) -> Params:
    """The settings of a round: its own if it has ended, else params.yaml.

    Raises:
        BadInput: there is no such round.
    """
    if has_ended(round_):
        return load_params(settings_path(round_))
    params = load_params()
    params.check_round(round_)
    return params
