"""The command line that all stages share: `python -m stages.<name> --round r0`."""

import argparse
import sys
from collections.abc import Callable

from stages.lib.core.errors import RondoError
from stages.lib.core.params import Params, load_params
from stages.lib.core.progress import reporting


def stage_main(name: str, stage: Callable[[Params, str], None]) -> None:
    """Parse `--round`, read params.yaml and run the stage.

    A RondoError is printed in one line and ends the process with its exit code. Long passes print
    how far they are.

    Args:
        name: the stage's name, for messages.
        stage: the stage's main function, called with params and round. Stages that all rounds share
            are called without `--round`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}")
    parser.add_argument("--round", help="a round of params.yaml, e.g. r0; default: the first one")
    named = parser.parse_args().round
    address = f"{name}@{named}" if named else name
    try:
        params = load_params()
        round_ = named or next(iter(params.rounds))
        params.check_round(round_)
        with reporting(address):
            stage(params, round_)
    except RondoError as error:
        print(f"{address}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
