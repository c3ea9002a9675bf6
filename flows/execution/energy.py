"""Time and energy of a stage, from Linux's energy counters of processor packages (RAPL).

A counter includes everything that runs on its package, from any process. It excludes GPUs, and
memory that has a RAPL domain of its own. On many machines only root may read the counters.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from flows.core.addresses import split_address
from stages.lib.core.params import Params

POWERCAP = Path("/sys/class/powercap")
EVERY_SECONDS = 60.0  # a counter wraps around every 20 minutes on a large processor
MICROJOULES_PER_WATT_HOUR = 3600e6


@dataclass(frozen=True)
class Counter:
    """The energy counter of a processor package, by its folder in sysfs."""

    folder: Path

    def read(self) -> tuple[int, int]:
        """The counter's value and the value at which it wraps around, in microjoules."""
        value, wrap = (
            int((self.folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
        )
        return value, wrap


def counters(powercap: Path = POWERCAP) -> list[Counter]:
    """The counters of whole packages; those of cores, graphics and memory are left out."""
    folders = sorted(powercap.glob("intel-rapl:*"))  # the kernel uses this name for AMD too
    return [Counter(folder) for folder in folders if _name(folder).startswith("package")]


def counters_of(address: str, params: Params) -> list[Counter]:
    """The counters for a stage; none if it computes elsewhere, while this machine waits."""
    return [] if params.elsewhere(split_address(address)[0]) else counters()


def _name(folder: Path) -> str:
    """The name of a RAPL domain; empty if it cannot be read, as in a container."""
    try:
        return (folder / "name").read_text()
    except OSError:
        return ""


class Meter:
    """Measures the time and energy of a `with` block. began: when it was entered, in seconds since
    the epoch; None before. seconds: how long it took, 0 before its end.

    Example:
        >>> with Meter(counters()) as meter:
        ...     train()
        >>> meter.seconds, meter.watt_hours()
        (62.1, 0.87)
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters, self.seconds = counters, 0.0
        self.began: float | None = None
        self._microjoules: int | None = 0 if counters else None  # None: not readable
        self._last_values: list[int] = []
        self._ended, self._reader = Event(), Thread(target=self._read_regularly, daemon=True)

    def __enter__(self) -> "Meter":
        self.began, self._started = time.time(), time.monotonic()
        self.read()
        self._reader.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._reader.join()
        self.read()
        self.seconds = time.monotonic() - self._started

    def watt_hours(self) -> float | None:
        """Energy of the block so far; None if there is no counter, or one is not readable."""
        if self._microjoules is None:
            return None
        return self._microjoules / MICROJOULES_PER_WATT_HOUR

    def read(self) -> None:
        """Add the increase of the counters since the last call.

        A counter may wrap around once between two calls; more would go unnoticed.
        """
        if self._microjoules is None:
            return
        try:
            readings = [counter.read() for counter in self.counters]
        except (OSError, ValueError):
            self._microjoules = None
            return
        values = [value for value, _ in readings]
        self._microjoules += sum(
            (value - last) % wrap
            for (value, wrap), last in zip(readings, self._last_values or values, strict=True)
        )
        self._last_values = values

    def _read_regularly(self) -> None:
        while self._microjoules is not None and not self._ended.wait(EVERY_SECONDS):
            self.read()
