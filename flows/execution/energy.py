"""Time and energy of a stage: Linux's counters of the processor packages (RAPL), where they may be
read.

They count all that runs on the processor, whoever started it. A GPU is not in them, nor is memory
of its own domain.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

POWERCAP = Path("/sys/class/powercap")
EVERY_SECONDS = 60.0  # a counter begins anew every 20 minutes on a large processor
MICROJOULES = 3600e6  # in a watt-hour


@dataclass(frozen=True)
class Counter:
    """A processor package's folder in sysfs."""

    folder: Path

    def read(self) -> tuple[int, int]:
        """Microjoules so far, and after how many it begins anew."""
        now, turn = (
            int((self.folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
        )
        return now, turn


def counters(powercap: Path = POWERCAP) -> list[Counter]:
    """Those of whole packages; their cores, graphics and memory have others."""
    folders = sorted(powercap.glob("intel-rapl:*"))  # AMD's too
    return [Counter(folder) for folder in folders if _name(folder).startswith("package")]


def _name(folder: Path) -> str:
    """Nothing where a container hides what the folder leads to."""
    try:
        return (folder / "name").read_text()
    except OSError:
        return ""


class Meter:
    """`with Meter(counters()) as meter: ...`: what that took."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters, self.seconds = counters, 0.0
        self._used: int | None = 0 if counters else None  # None: not readable
        self._last: list[int] = []
        self._ended, self._watch = Event(), Thread(target=self._read_on, daemon=True)

    def __enter__(self) -> "Meter":
        self._started = time.monotonic()
        self.read()
        self._watch.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watch.join()
        self.read()
        self.seconds = time.monotonic() - self._started

    def watt_hours(self) -> float | None:
        """None where there is no counter, or one that only root may read."""
        return None if self._used is None else self._used / MICROJOULES

    def read(self) -> None:
        """Add what the counters have gone on by; to be called more often than they begin anew."""
        if self._used is None:
            return
        try:
            found = [counter.read() for counter in self.counters]
        except (OSError, ValueError):
            self._used = None
            return
        now = [value for value, _ in found]
        self._used += sum(
            (new - old) % turn for (new, turn), old in zip(found, self._last or now, strict=True)
        )
        self._last = now

    def _read_on(self) -> None:
        while self._used is not None and not self._ended.wait(EVERY_SECONDS):
            self.read()
