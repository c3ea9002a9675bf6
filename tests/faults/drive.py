"""`python -m tests.faults.drive ADDRESS`: bring one stage up to date, as `rondo run` does."""

import sys

from flows.execution import dvc_stages
from stages.lib.core.errors import typed

if __name__ == "__main__":
    try:
        print(dvc_stages.run(sys.argv[1], lambda line: print(line, flush=True)).value)
    except Exception as error:
        if (failure := typed(error)) is None:
            raise
        sys.exit(f"{type(failure).__name__}: {failure}")
