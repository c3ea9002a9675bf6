"""verl's real wheel, for tests: `make test-engines` downloads it, and runs these tests in an
environment that has Hydra and what verl imports.
"""

import os
from pathlib import Path

import pytest

WHEEL = os.environ.get("VERL_WHEEL", "")
needs_verl = pytest.mark.skipif(not WHEEL, reason="needs verl's wheel: make test-engines gets it")
FOLDER = Path(WHEEL or "verl.whl").with_suffix("")  # its files, once unpacked
