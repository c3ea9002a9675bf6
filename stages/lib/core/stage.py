"""What every `python -m stages.<name> --round r0` does around the stage itself."""

import argparse
import sys
from collections.abc import Callable

from stages.lib.core.errors import RondoError
from stages.lib.core.params import Params, load_params


def stage_main(name: str, stage: Callable[[Params, str], None]) -> None:
    """Parse `--round`, read params.yaml, run the stage; a RondoError ends the process with its
    code.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}")
    parser.add_argument("--round", default="r0", help="round of params.yaml, e.g. r0")
    round_ = parser.parse_args().round
    try:
        params = load_params()
        params.check_round(round_)
        stage(params, round_)
    except RondoError as error:
        print(f"{name}@{round_}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
