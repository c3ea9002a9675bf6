"""The RAM that this process may use and has used at most, and freed memory that it gives back."""

import ctypes
import resource
import sys
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


def trim_heap() -> None:
    """Return the free memory of the heap to the system; its next use costs about 0.1 s per GB.

    The malloc settings of a run (flows/execution/dvc_stages.py) keep freed memory in the process.
    Texts differ in length, so a batch does not fit into what the batch before left free, and the
    heap grows with every step of a training. Only with glibc, whose settings they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
