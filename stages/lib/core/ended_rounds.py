"""Ended rounds: a run does not run their stages again (flows/execution/history.py ends a round).

`rounds/<round>/params.yaml` makes a round an ended one; it has the settings of its stages.
"""

from pathlib import Path

from stages.lib.core.files import ROUNDS
from stages.lib.core.params import Params, load_params


def settings_path(round_: str) -> Path:
    return ROUNDS / round_ / "params.yaml"


def ended_names() -> set[str]:
    return {path.parent.name for path in ROUNDS.glob("*/params.yaml")}


def has_ended(round_: str) -> bool:
    """False also for a name that is no folder of rounds/, such as `../elsewhere`."""
    return round_ in ended_names()


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
