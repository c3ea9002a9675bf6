"""Functions that params.yaml names, `module:name`; light to import, so that a run can ask before it starts."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from stages.errors import BadInput
from stages.prompts import Prompt

Number = Callable[[Sequence[Prompt], Sequence[str]], list[float]]  # one number a response


def load_function(named: str, key: str) -> Number:
    """`key`: where in params.yaml it is named.

    Raises:
        BadInput: there is no such module, or no such function in it.
    """
    if os.getcwd() not in sys.path:  # of a script of .venv/bin it is not
        sys.path.insert(0, os.getcwd())
    module, _, name = named.partition(":")
    try:
        function: Number = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{key}: {named} cannot be imported ({error}); put the module in the project's folder") from None
    return function
