"""The RAM that this process may use."""

from pathlib import Path

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container: bytes, or `max`


def ram_bytes() -> int:
    """The RAM of this machine, or of this container if it has a limit."""
    total = int(psutil.virtual_memory().total)
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return total if limit == "max" else min(total, int(limit))
