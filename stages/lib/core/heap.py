"""Free memory of the heap, returned to the operating system.

The malloc settings of a run (flows/execution/dvc_stages.py) keep freed memory in the process. Texts
differ in length, so a batch does not fit into what the batch before left free, and the heap grows
with every step of a training.
"""

import ctypes
import sys


def trim_heap() -> None:
    """Return the free memory; its next use costs about 0.1 s per GB.

    Only with glibc, whose settings they are; elsewhere nothing is done.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
