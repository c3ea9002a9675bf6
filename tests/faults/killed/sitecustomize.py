"""SIGKILL of the process that makes the N-th change of a file in a folder, before the change;
Python imports this module as it starts if its folder is on PYTHONPATH.

RONDO_KILL is `FOLDER:COUNTER:N`. All processes append a byte to the file COUNTER per change, and
the victim makes the file COUNTER.killed. A file that was about to be emptied is empty afterwards.
With N = 0, the changes are counted and nothing is killed. Changes by libraries in C and Rust, e.g.
of SQLite and safetensors, are not seen; the next change by Python is.
"""

import os
import signal
import sys

CHANGES = {  # events of sys.addaudithook, and which of their arguments is the path that changes
    "open": 0,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.mkdir": 0,
    "os.link": 1,
    "os.symlink": 1,
    "os.truncate": 0,
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def hook(event: str, arguments: "tuple[object, ...]") -> None:
    """Count a change of a file, and end at the N-th."""
    if event not in CHANGES or "RONDO_KILL" not in os.environ:
        return
    path, flags = arguments[CHANGES[event]], arguments[2] if event == "open" else WRITES
    if not isinstance(path, (str, bytes, os.PathLike)) or not flags & WRITES:  # type: ignore[operator]
        return
    folder, counter, number = os.environ["RONDO_KILL"].split(":")
    path = os.path.join(os.getcwd(), os.fsdecode(path))
    if not path.startswith(folder + os.sep) or "__pycache__" in path:
        return
    descriptor = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b".")
    if os.fstat(descriptor).st_size == int(number):
        os.close(os.open(f"{counter}.killed", os.O_WRONLY | os.O_CREAT))
        if event == "open" and flags & os.O_TRUNC:  # type: ignore[operator]
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(descriptor)


sys.addaudithook(hook)
