"""Hydra's overrides, which verl and NeMo RL read."""

import re
from typing import Any


def quoted(value: Any) -> str:
    """A value of JSON in the grammar of Hydra's overrides.

    >>> print(quoted("it's"), quoted(True), quoted(0.5), quoted(["a", 1]))
    'it\\'s' true 0.5 ['a',1]
    >>> print(quoted({"a": None}))
    {a:null}
    """
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{quoted(item)}' for key, item in value.items())}}}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    # backslashes count only before a quote, and before the closing one
    text = re.sub(
        r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), str(value)
    )
    return f"'{text}'"
