"""A quality gate: compares the metrics of earlier stages with thresholds; loads no model.

Reads rounds/<round>/<stage>/metrics.json and approvals/<round>/<gate>.json. Writes the verdict to
reports/<round>/gate_<gate>.json and, if the gate passes, gates/<round>/<gate>.ok. If it fails, the
process ends with exit code 3, and each failed metric is printed with its next step.

Run: `python -m stages.gate --gate sft|reward|promote --round r0`.
"""

import argparse
import sys

from stages.gate.verdict import run_gate
from stages.lib.core.errors import print_failure
from stages.lib.core.params import load_params
from stages.lib.thresholds import THRESHOLDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.gate")
    parser.add_argument("--gate", choices=sorted(THRESHOLDS), required=True)
    parser.add_argument("--round", required=True, help="round of params.yaml, e.g. r0")
    arguments = parser.parse_args()
    gate, round_ = arguments.gate, arguments.round
    try:
        params = load_params()
        params.check_round(round_)
        run_gate(params, gate, round_)
    except Exception as error:
        sys.exit(print_failure(error, f"gate_{gate}@{round_}"))


if __name__ == "__main__":
    main()
