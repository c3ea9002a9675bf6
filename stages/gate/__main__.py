"""A quality gate.

Run: `python -m stages.gate --gate sft|reward|promote --round r0`.
"""

import argparse
import sys

from stages.gate.thresholds import THRESHOLDS
from stages.gate.verdict import run_gate
from stages.lib.core.errors import RondoError
from stages.lib.core.params import load_params


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.gate")
    parser.add_argument("--gate", choices=sorted(THRESHOLDS), required=True)
    parser.add_argument("--round", default="r0", help="round of params.yaml, e.g. r0")
    arguments = parser.parse_args()
    try:
        params = load_params()
        params.check_round(arguments.round)
        run_gate(params, arguments.gate, arguments.round)
    except RondoError as error:
        print(
            f"gate_{arguments.gate}@{arguments.round}: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
