"""How much the tests of this folder try: a little in `make test`, a sample of everything with
RONDO_FAULTS=full (`make test-faults`), and everything with RONDO_FAULTS=all (hours).
"""

import os
from collections.abc import Sequence
from typing import TypeVar

ALL = os.environ.get("RONDO_FAULTS") == "all"
FULL = ALL or os.environ.get("RONDO_FAULTS") == "full"
T = TypeVar("T")


def trials(fast: int, all_: int) -> int:
    """The number of inputs of a test."""
    return all_ if ALL else all_ // 2 if FULL else fast


def sample(items: Sequence[T], count: int) -> list[T]:
    """`count` items at equal distances, the same in each run; with RONDO_FAULTS=all, all items."""
    if ALL or count >= len(items):
        return list(items)
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]
