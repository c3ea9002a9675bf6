"""How many faults a run of the tests tries: a few, or with RONDO_FAULTS=full (`make test-faults`)
all.
"""

import os

FULL = os.environ.get("RONDO_FAULTS") == "full"
