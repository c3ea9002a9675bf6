"""The time that a stage takes."""

import time


class Meter:
    """Measures the time of a `with` block. began: when it was entered, in seconds since the epoch;
    None before. seconds: how long it took, 0 before its end.

    Example:
        >>> with Meter() as meter:
        ...     train()
        >>> meter.seconds
        62.1
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> "Meter":
        self.began, self._started = time.time(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
