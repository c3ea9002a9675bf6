"""Measures what a round costs as rounds add up.

`python bench/rounds.py [ROUNDS]` clones this repository, runs the first round of the tiny preset,
and then `rondo next-round` until there are ROUNDS (default 30). It prints the seconds of each, and
the last round's against the second's.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).parents[1]
GATE_FAILED = (
    3  # the exit code of a run whose last policy is not promoted: the next round may begin
)


def seconds_of(folder: Path, *arguments: str) -> float:
    """Run a command of Rondo and return its seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, GATE_FAILED):
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}")
    return time.monotonic() - start


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
        seconds = [seconds_of(clone, "run", "--preset", "tiny", "--rounds", "1")]
        for _ in range(number - 1):
            seconds.append(seconds_of(clone, "next-round"))
            print(f"round {len(seconds)}: {seconds[-1]:.0f} s", flush=True)
    print(f"round {number} / round 2: {seconds[-1] / seconds[1]:.2f}")
