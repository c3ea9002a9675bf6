"""The RAM that this process may use, and the most that it has used."""

import resource
from pathlib import Path

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container: bytes, or `max`
STATUS = Path("/proc/self/status")  # on Linux


def ram_bytes() -> int:
    """The RAM of this machine, or of this container if it has a limit."""
    total = int(psutil.virtual_memory().total)
    limit = CGROUP_LIMIT.read_text("utf-8").strip() if CGROUP_LIMIT.exists() else "max"
    return total if limit == "max" else min(total, int(limit))


def peak_bytes() -> int:
    """Resident memory of this process at its peak."""
    if STATUS.exists():
        lines = STATUS.read_text("utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    # macOS: in bytes. Linux's own would begin with the peak of the process that started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
