"""Scoring functions that params.yaml names as `module:function`: import, and a check of results.

Imports no heavy library, so that `rondo run` can check the names before it starts.
"""

import importlib
import math
import os
import sys
from collections.abc import Sequence

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.types import ScoreFunction


def import_function(named: str, key: str) -> ScoreFunction:
    """Import a scoring function that params.yaml names.

    Args:
        named: `module:function`; the module may lie in the working directory.
        key: where params.yaml names it, for the error message.

    Returns:
        The function `(prompts, responses) -> list[float]`, one number per response. Neither its
        signature nor its results are checked here; see `check_scores`.

    Raises:
        BadInput: there is no such module, or it has no such attribute.

    Example:
        >>> function = import_function("stages.lib.metrics.sentiment:sentiment", "evaluate.judges")
        >>> function(["The food"], [" was wonderful."]) > function(["The food"], [" was awful."])
        True
    """
    # A script of .venv/bin, e.g. `rondo`, has its own folder on sys.path, not the working one.
    if os.getcwd() not in sys.path:
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
    """Check what a scoring function returned.

    Args:
        numbers: the result of the function.
        responses: how many responses it was given.
        who: name of the function, for the error message.

    Raises:
        RondoError: `numbers` does not have one finite number per response.
    """
    if len(numbers) != responses or not all(
        isinstance(number, int | float) and math.isfinite(number) for number in numbers
    ):
        raise RondoError(
            f"{who}: one finite number for each of {responses} responses expected, "
            f"got {numbers!r:.200}"
        )
