"""Measures what a round costs as rounds add up.

`python bench/rounds.py [ROUNDS]` clones this repository, runs the first round of the tiny preset,
and then `rondo next-round` until there are ROUNDS (default 30, at least 2). It prints the seconds
of each, and the last round's against the second's.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.lib.core.errors import GateFailed

PROJECT = Path(__file__).parents[1]


def seconds_of(clone: Path, number: int) -> float:
    """Run a round, from 0, and return its seconds."""
    start = time.monotonic()
    arguments = ["next-round"] if number else ["run", "--preset", "tiny", "--rounds", "1"]
    command = [sys.executable, "-m", "flows.cli", *arguments]
    done = subprocess.run(command, cwd=clone, stdout=subprocess.DEVNULL, check=False)
    seconds = time.monotonic() - start
    # a policy that is not promoted keeps no round from following; another failure does
    complete = (clone / f"rounds/r{number}/replay/metrics.json").exists()
    if done.returncode not in (0, GateFailed.exit_code) or not complete:
        raise SystemExit(f"round {number + 1} ended with {done.returncode}")
    print(f"round {number + 1}: {seconds:.0f} s", flush=True)
    return seconds


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    if rounds < 2:
        raise SystemExit("ROUNDS: expected at least 2")
    with TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
        seconds = [seconds_of(clone, number) for number in range(rounds)]
    print(f"round {rounds} / round 2: {seconds[-1] / seconds[1]:.2f}")
