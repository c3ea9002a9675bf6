"""Numbers that others sent."""

import math
from typing import SupportsFloat


def is_finite(number: SupportsFloat) -> bool:
    """Whether a float can hold the number, and it is neither NaN nor infinite.

    `math.isfinite` fails for an integer of more than 308 digits, which JSON can have.

    >>> is_finite(1), is_finite(math.nan), is_finite(10**400)
    (True, False, False)
    """
    try:
        return math.isfinite(number)
    except OverflowError:
        return False
