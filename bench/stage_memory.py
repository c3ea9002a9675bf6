"""Runs stages of a round, and prints the estimate of their memory beside the measured peak.

`python bench/stage_memory.py sft reward ppo --set sft.max_steps=2` in a project folder where the
stages before have run; `--set` changes params.yaml for the time of the run. Peaks are of resident
memory, of the stage or of a process that it started.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from flows.core.config import resolve, write_params
from flows.execution import estimate, text_lengths
from flows.execution.dvc_stages import stage_environment
from flows.execution.machine import measure
from flows.execution.model_shape import read_shape
from stages.lib.core.params import load_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--round", default="r0")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    before, shape = Path("params.yaml").read_text(), read_shape(load_params().assets.model)
    try:
        params = resolve("keep", None, options.set)
        write_params(params)
        counts = text_lengths.count(options.round)
        if shape is None or counts is None:
            sys.exit("the model's shape or prepare's data is missing")
        lengths = text_lengths.measured(params, counts)
        estimated = estimate.stage_memory(params, measure(), shape, lengths)
        print("| stage | estimate, GB | measured, GB | estimate / measured |\n|---|---:|---:|---:|")
        for stage in options.stages:
            peak = peak_of([sys.executable, "-m", f"stages.{stage}", "--round", options.round])
            size = estimated[stage]
            print(f"| {stage} | {size / 1e9:.2f} | {peak / 1e9:.2f} | {size / peak:.2f} |")
    finally:
        Path("params.yaml").write_text(before)


def peak_of(command: list[str]) -> int:
    """Bytes of resident memory of the command at its peak.

    Raises:
        CalledProcessError: the command failed.
    """
    process = subprocess.Popen(command, env=stage_environment())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
