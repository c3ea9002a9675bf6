from pathlib import Path

import psutil
import pytest

from stages.lib.core import ram


def test_a_containers_limit_counts_only_if_the_machine_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(ram, "CGROUP_LIMIT", tmp_path / "memory.max")
    assert ram.ram_bytes() == total  # no container
    for limit, usable in (("max", total), (f"{total // 2}", total // 2), (f"{2 * total}", total)):
        ram.CGROUP_LIMIT.write_text(f"{limit}\n")
        assert ram.ram_bytes() == usable
