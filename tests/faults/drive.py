"""`python -m tests.faults.drive ADDRESS`: bring one stage up to date, as `rondo run` does."""

import sys

from flows.execution import dvc_stages
from stages.lib.core.errors import print_failure

if __name__ == "__main__":
    try:
        print(dvc_stages.run(sys.argv[1], lambda line: print(line, flush=True)).value)
    except Exception as error:
        sys.exit(print_failure(error, "drive"))
