"""Numbers that responses are given, by functions that params.yaml names (`module:name`) among
others.

Light to import, so that a run can ask before it starts.
"""

import importlib
import math
import os
import sys
from collections.abc import Sequence

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.types import ScoreFunction


def import_function(named: str, key: str) -> ScoreFunction:
    """`key`: where in params.yaml it is named.

    Raises:
        BadInput: there is no such module, or no such function in it.
    """
    if os.getcwd() not in sys.path:  # of a script of .venv/bin it is not
        sys.path.insert(0, os.getcwd())
    module, _, name = named.partition(":")
    try:
        function: ScoreFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"{key}: {named} cannot be imported ({error}); put the module in the project's folder"
        ) from None
    return function


def check_scores(numbers: Sequence[float], responses: int, who: str) -> None:
    """
    Raises:
        RondoError: not one finite number for each of so many responses.
    """
    if len(numbers) != responses or not all(
        isinstance(each, int | float) and math.isfinite(each) for each in numbers
    ):
        raise RondoError(
            f"{who}: one finite number for each of {responses} responses wanted, got {numbers!r:.200}"
        )
