"""Bad input is given to the project's own readers, and what they make of it is classified.

Accepted: the result passes a check that does not use the reader. Refused: a RondoError that names
the place and the next step. Anything else is a defect: another exception, a wrong result, more than
a second of CPU time or more than 1 GB of memory.
"""

import random
import re
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from stages.lib.core.errors import RondoError
from tests.paths import ROOT

MAX_SECONDS, MAX_BYTES = 1.0, 1 << 30
MAX_MESSAGE = 3000  # characters
SHOWN = 12  # defects
COUNTS: dict[str, Counter[str]] = {}  # of this test, by kind: accepted, refused
# words of a next step
STEPS = re.compile(
    r"\b(run|restore|correct|fix|delete|save|set|choose|expected|remove|write|rename|raise|lower|"
    r"give|add|see|copy|start|repair|wanted|needs|must|wrong|name|use|spell|unset|convert|"
    r"did you mean)\b",
    re.IGNORECASE,
)
Bad = TypeVar("Bad")


class Trials:
    """The trials of one kind of input.

    Args:
        kind: its name in the table.
        place: what the message of an error has to contain, e.g. the name of the file.
    """

    def __init__(self, kind: str, place: str) -> None:
        self.kind, self.place = kind, re.compile(place)
        self.counts = COUNTS.setdefault(kind, Counter())
        self.defects: dict[str, str] = {}
        self.slowest = (0.0, "")  # seconds, and the input

    def run(
        self,
        number: int,
        make: Callable[[random.Random], Bad],
        read: Callable[[Bad], Any],
        check: Callable[[Bad, Any], None],
        refuses: bool = True,
        seconds: float = MAX_SECONDS,
    ) -> None:
        """Try bad inputs, and fail with all defects.

        Args:
            number: of the inputs.
            make: a bad input, from a generator with a seed of its own.
            read: the project's own reader.
            check: asserts that an accepted result is right for the input.
            refuses: whether some of the inputs have to be refused.
            seconds: of CPU time at most, per input.
        """
        before = peak_bytes()
        for seed in range(number):
            self.attempt(seed, make(random.Random(f"{self.kind} {seed}")), read, check)
        assert not self.defects, self.report()
        assert self.slowest[0] < seconds, f"{self.kind}: {self.slowest} s of CPU time"
        assert peak_bytes() - before < MAX_BYTES, f"{self.kind}: more than 1 GB"
        # a harness that only refuses, or never does, tests nothing
        assert self.counts["accepted"] and (self.counts["refused"] or not refuses), self.counts

    def attempt(
        self,
        seed: int,
        bad: Bad,
        read: Callable[[Bad], Any],
        check: Callable[[Bad, Any], None],
    ) -> None:
        """Try one input, and remember what is wrong with the outcome."""
        started = time.process_time()
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                result = read(bad)
            self.note_time(time.process_time() - started, seed, bad)
            check(bad, result)
            self.counts["accepted"] += 1
        except RondoError as error:
            self.note_time(time.process_time() - started, seed, bad)
            self.counts["refused"] += 1
            self.check_message(seed, bad, str(error))
        except Exception as error:
            # of the project's frames the last
            frames = [
                f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)
                if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename
            ]
            self.add(f"{type(error).__name__} {frames[-1]}", f"{error!s:.200}", seed, bad)

    def note_time(self, seconds: float, seed: int, bad: Any) -> None:
        self.slowest = max(self.slowest, (seconds, f"seed {seed}: {bad!r:.300}"))

    def check_message(self, seed: int, bad: Any, message: str) -> None:
        if not self.place.search(message):
            self.add(f"no place: {message:.80}", message[:300], seed, bad)
        elif not STEPS.search(message):
            self.add(f"no next step: {message:.80}", message[:300], seed, bad)
        elif len(message) > MAX_MESSAGE:
            self.add("a message that nobody reads", f"{len(message)} characters", seed, bad)

    def add(self, defect: str, detail: str, seed: int, bad: Any) -> None:
        self.defects.setdefault(defect, f"{detail} (seed {seed}: {bad!r:.300})")

    def report(self) -> str:
        lines = [f"{defect}: {detail}" for defect, detail in self.defects.items()]
        return "\n".join([f"{self.kind}: {len(lines)} defects", *lines[:SHOWN]])


def peak_bytes() -> int:
    """Memory of this process at its peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
