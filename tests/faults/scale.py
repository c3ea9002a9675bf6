"""How much the tests of this folder try: some of it in `make test`, all of it with
RONDO_FAULTS=full.
"""

import os

FULL = os.environ.get("RONDO_FAULTS") == "full"


def trials(fast: int, full: int) -> int:
    """The number of trials of a test, by the environment variable RONDO_FAULTS."""
    return full if FULL else fast
