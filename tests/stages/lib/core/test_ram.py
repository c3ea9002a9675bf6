import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.execution.dvc_stages import MALLOC
from stages.lib.core import ram
from tests.paths import ROOT

# 300 pieces of 1 MB, each with a small piece behind it that is still in use
FREES_300_MB = """
import psutil
from stages.lib.core.ram import trim_heap
pieces = [(bytearray(1 << 20), bytearray(4096)) for _ in range(300)]
pieces = [small for _, small in pieces]
freed = psutil.Process().memory_info().rss
trim_heap()
print((freed - psutil.Process().memory_info().rss) >> 20)
"""


def test_a_containers_limit_counts_only_if_the_machine_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(ram, "CGROUP_LIMIT", tmp_path / "memory.max")
    assert ram.ram_bytes() == total  # no container
    for limit, usable in (("max", total), (f"{total // 2}", total // 2), (f"{2 * total}", total)):
        ram.CGROUP_LIMIT.write_text(f"{limit}\n")
        assert ram.ram_bytes() == usable


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is on Linux only")
def test_memory_that_was_freed_between_used_pieces_is_returned() -> None:
    environment = {**os.environ, "GLIBC_TUNABLES": MALLOC, "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output([sys.executable, "-c", FREES_300_MB], env=environment)
    assert 250 <= int(output) <= 320
