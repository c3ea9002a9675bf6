"""Lines that show how far a long pass is, so that nothing is silent for more than 20 seconds.

`reporting` begins to watch a process: whenever it has printed nothing for `QUIET_SECONDS`, a line
names the innermost pass, how much of it is done, and the time that is left. A pass is a `with
progress(...)` block or a loop over `tracked(...)`. Short passes print nothing, and outside of
`reporting`, as in tests and in models that MLflow loads, none does.

    [sft@r0] sampling 1536/8192 tokens  eta 1:05  base model
    [sft@r0] loading assets/model  for 0:20
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event, RLock, Thread
from typing import TypeVar

QUIET_SECONDS = 10.0  # without a line, until the next one is due
TICK_SECONDS = 1.0  # between two checks of whether a line is due
UNKNOWN = "?"
STEP = "step"  # the name of a stage's own steps, e.g. of training, in the same format
PROGRESS = re.compile(
    r"\[\S+\] (?P<what>\S.*?)"
    r"(?: (?P<done>\d+)/(?P<total>\d+)(?: (?P<unit>[\w-]+))?  eta (?P<eta>\d+:\d\d|\?)"
    r"|  for (?P<elapsed>\d+:\d\d))"
    r"(?:  (?P<details>.*))?$"
)

Item = TypeVar("Item")


class Reporter:
    """Prints a line about the innermost pass if nothing was printed for a while.

    Args:
        label: of the lines, e.g. `sft@r0`.
        emit: prints a line.
        quiet: seconds without a line until the next one is due.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        label: str,
        emit: Callable[[str], object],
        quiet: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.emit, self.quiet, self.clock = label, emit, quiet, clock
        self.passes: list[Pass] = []  # the innermost one is the last
        self.last_line = clock()
        self.lock = RLock()  # passes are counted in several threads, and a line is due only once

    def begin(self, what: str, total: int, unit: str) -> "Pass":
        """Begin a pass within those that have not ended."""
        begun = Pass(self, what, total, unit, self.clock())
        self.passes.append(begun)
        return begun

    def tick(self) -> None:
        """Print a line if one is due."""
        with self.lock:
            if self.clock() - self.last_line >= self.quiet:
                self.emit(self.line())
                self.printed()

    def printed(self) -> None:
        """Note that a line was printed."""
        self.last_line = self.clock()

    def line(self) -> str:
        """The innermost pass, and after its ETA those around it; without one, the time without a
        line.
        """
        passes = list(self.passes)  # another thread may end one
        if not passes:
            return f"[{self.label}] working  for {minutes(self.clock() - self.last_line)}"
        *around, innermost = passes
        details = [one.state() for one in reversed(around)]
        return "  ".join([f"[{self.label}] {innermost.state()}", innermost.time(), *details])


@dataclass(eq=False)
class Pass:
    """Work on `total` items; 0: a number that is not known.

    started, counted: when the pass began and its last items were done, by the reporter's clock.
    """

    reporter: Reporter
    what: str
    total: int
    unit: str
    started: float
    done: int = 0
    counted: float = 0.0

    def add(self, items: int = 1) -> None:
        """Count items as done."""
        with self.reporter.lock:
            self.done, self.counted = self.done + items, self.reporter.clock()
        self.reporter.tick()

    def state(self) -> str:
        return f"{self.what} {self.done}/{self.total} {self.unit}" if self.total else self.what

    def time(self) -> str:
        """The time that is left, if the rest takes as long per item; else the time so far."""
        now = self.reporter.clock()
        if not self.total:
            return f"for {minutes(now - self.started)}"
        if not self.done:
            return f"eta {UNKNOWN}"
        rest = (self.counted - self.started) / self.done * (self.total - self.done)
        return f"eta {minutes(max(rest - (now - self.counted), 0.0))}"


NOT_REPORTING = Reporter("", lambda _: None, quiet=float("inf"))
_current = NOT_REPORTING


@contextmanager
def reporting(
    label: str, emit: Callable[[str], object] | None = None, quiet: float = QUIET_SECONDS
) -> Iterator[Reporter]:
    """Within the block, print a line whenever this process has printed none for a while, also
    counting from before the block if it is within another one.

    Args:
        label: of the lines, e.g. `sft@r0`.
        emit: prints a line, by default to stdout; it is called in several threads, one at a time.
        quiet: seconds without a line until the next one is due.
    """
    global _current
    outer, ended = _current, Event()
    reporter = Reporter(label, emit or print_line, quiet)
    if outer is not NOT_REPORTING:
        reporter.last_line = outer.last_line  # silence goes on from block to block
    _current = reporter

    def watch() -> None:
        while not ended.wait(TICK_SECONDS):
            if _current is reporter:  # else a block within this one reports
                reporter.tick()

    # a pass whose single item takes long cannot print by itself
    thread = Thread(target=copy_context().run, args=[watch], daemon=True)
    thread.start()
    try:
        yield reporter
    finally:
        _current = outer
        outer.last_line = reporter.last_line
        ended.set()
        thread.join(TICK_SECONDS)


def reporting_to_parent(label: str) -> AbstractContextManager[Reporter]:
    """`reporting` of a process whose parent prints the lines (fresh_process.py): to stderr, since
    stdout is its result, and before the parent would print a line of its own.
    """
    return reporting(label, print_error_line, QUIET_SECONDS - 3 * TICK_SECONDS)


@contextmanager
def progress(what: str, total: int = 0, unit: str = "rows") -> Iterator[Pass]:
    """A pass, or a part of a stage whose passes then name it.

    Args:
        what: what is done, e.g. `sampling`; or for what, e.g. `base model`.
        total: number of items; 0 if it is not known.
        unit: of the items.

    Example:
        with progress("sampling", total=8 * 24, unit="tokens") as sampling:
            for _ in range(24):
                sampling.add(8)
    """
    begun = _current.begin(what, total, unit)
    try:
        yield begun
    finally:
        begun.reporter.passes.remove(begun)


def tracked(what: str, items: Iterable[Item], total: int, unit: str = "rows") -> Iterator[Item]:
    """The items, as a pass of `progress`: one is done when the next one is requested."""
    with progress(what, total, unit) as begun:
        for item in items:
            yield item
            begun.add()


def print_line(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)
    _current.printed()


def print_error_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def minutes(seconds: float) -> str:
    """
    >>> minutes(65.9)
    '1:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
