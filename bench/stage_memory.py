"""The estimated memory of each stage of a run beside the measured peak.

    rondo run 2>&1 | tee run.log
    python bench/stage_memory.py run.log

It runs in the project folder, whose params.yaml and texts are those of the run. A stage prints its
peak as its last line: resident memory, without the processes that it started.
"""

import argparse
import re
import sys
from pathlib import Path

from flows.execution import estimate, text_lengths
from flows.execution.machine import measure
from flows.execution.model_shape import read_shape
from stages.lib.core.params import load_params

PEAK = r"\[(\w+)@{round}\] peak memory: ([\d.]+) GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path, help="the output of `rondo run`")
    log = parser.parse_args().log.read_text()
    params = load_params()
    machine, shape = measure(), read_shape(params.assets.model)
    print("| stage | estimate, GB | measured, GB | estimate / measured |\n|---|---:|---:|---:|")
    for round_ in params.rounds:
        counts = text_lengths.count(round_)
        if shape is None or counts is None:
            sys.exit(f"the model's shape or the data of {round_} is missing")
        lengths = text_lengths.measured(params, counts)
        estimated = estimate.stage_memory(params, machine, shape, lengths)
        for stage, gigabytes in re.findall(PEAK.format(round=round_), log):
            if stage in estimated:
                size, peak = estimated[stage] / 1e9, float(gigabytes)
                print(f"| {stage}, {round_} | {size:.2f} | {peak:.2f} | {size / peak:.2f} |")


if __name__ == "__main__":
    main()
