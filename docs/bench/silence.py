"""Measures how long a command prints nothing.

`python docs/bench/silence.py [--top N] COMMAND ...` runs a command, prints its lines with the
seconds since its start, and at the end its longest silences, each with the lines before and after
it. For example: `python docs/bench/silence.py rondo run --preset smoke`.
"""

import argparse
import subprocess
import sys
import time
from itertools import pairwise
from typing import NamedTuple

SHOWN = 100  # characters of a line in the list of silences
TARGET = 20.0  # seconds


class Line(NamedTuple):
    """A line of output. seconds: from the command's start to its end of line."""

    seconds: float
    text: str


class Silence(NamedTuple):
    """The time between two lines that follow each other."""

    before: Line
    after: Line

    @property
    def seconds(self) -> float:
        return self.after.seconds - self.before.seconds


def longest(lines: list[Line], top: int) -> list[Silence]:
    """The longest silences, the longest one first.

    >>> [silence] = longest([Line(0, "start"), Line(3, "a"), Line(9, "b"), Line(10, "c")], 1)
    >>> silence.seconds, silence.before.text
    (6, 'a')
    """
    silences = [Silence(*pair) for pair in pairwise(lines)]
    return sorted(silences, key=lambda silence: -silence.seconds)[:top]


def run(command: list[str]) -> tuple[int, list[Line]]:
    """Run a command; returns its exit code, and its lines between `start` and `end`."""
    started = time.monotonic()
    lines = [Line(0.0, "start")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    for text in map(str.rstrip, process.stdout):
        lines.append(Line(time.monotonic() - started, text))
        print(f"{lines[-1].seconds:8.1f}  {text}", flush=True)
    code = process.wait()
    return code, [*lines, Line(time.monotonic() - started, "end")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--top", type=int, default=10, help="number of silences to list")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    code, lines = run(options.command)
    silences = longest(lines, options.top)
    too_long = sum(silence.seconds > TARGET for silence in longest(lines, len(lines)))
    print(f"\n{len(lines) - 2} lines in {lines[-1].seconds:.0f} s, exit code {code}")
    print(f"{too_long} silences of more than {TARGET:.0f} s; the longest:")
    for silence in silences:
        print(f"{silence.seconds:8.1f} s after   {silence.before.text[:SHOWN]}")
        print(f"           before  {silence.after.text[:SHOWN]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
