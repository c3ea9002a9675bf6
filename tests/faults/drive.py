"""`python -m tests.faults.drive ADDRESS`: bring one stage up to date, as `rondo run` does."""

import sys

from flows.execution import dvc_stages
from stages.lib.core.errors import RondoError

if __name__ == "__main__":
    try:
        print(dvc_stages.run(sys.argv[1], lambda line: print(line, flush=True)).value)
    except RondoError as error:
        sys.exit(f"{type(error).__name__}: {error}")
