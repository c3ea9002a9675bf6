"""Faults inside a Python process, at a point that a test has chosen; Python imports this module as
it starts if its folder is on PYTHONPATH.

A point is a change of a file, before it happens: (operation, path, how often this process has done
it, from 1); `open` that only appends is `append`. RONDO_FAULT is JSON: `{"trace": FILE}` appends
every point to FILE, as JSON lines; with `victim`, `operation`, `path`, `occurrence` and `do`, the
process of that name is killed at that point (`SIGKILL`), or just after a file was opened and
emptied (`EMPTIED`), or the operation fails once with an error of errno (`EIO`). `struck`, a file,
is made before that. Changes by libraries in C and Rust, e.g. of safetensors, are not seen; the next
change by Python is.

RONDO_CLOCK names a file with seconds, which may change at any time: `time.time` is that much later.
"""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TARGETS = {  # events of sys.addaudithook, and which of their arguments is the path that changes
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.mkdir": 0,
    "os.link": 1,
    "os.symlink": 1,
    "os.truncate": 0,
}
# names that differ from run to run: of temporary files, and of DVC's cache by content
RANDOM = re.compile(
    r"(?<=md5/)[0-9a-f]{2}(/[0-9a-f]{30}(\.dir)?)?|(?<=runs/).*|(?<=\.)[\w-]{22}(?=\.tmp)"
    r"|(?<=uploading\.)\w{8}|(?<=-)[0-9a-f]{8}(?=[./])|[0-9a-f]{32}|(?<=/)[0-9a-f]{12}(?=/|$)|\d{6,}"
)
busy = threading.local()
counts: "Counter[tuple[int, str, str]]" = Counter()


def role() -> str:
    """The module that this process runs: `stages.sft`, `dvc`."""
    parts = sys.argv[0].removesuffix(".py").removesuffix("/__main__").split("/")
    for top in ("stages", "flows", "tests"):
        if top in parts:
            return ".".join(parts[parts.index(top) :])
    return parts[-1]


def changed_path(event: str, arguments: tuple[object, ...]) -> object:
    """The path that an audit event changes, None if it changes none."""
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else False
        return path if writes or (isinstance(flags, int) and flags & WRITES) else None
    return arguments[TARGETS[event]] if event in TARGETS else None


def strike(event: str, path: str) -> None:
    """Record the point, and do what RONDO_FAULT wants there."""
    folder = os.getcwd()
    path = os.path.normpath(os.path.join(folder, path))
    if not path.startswith(folder + os.sep) or "__pycache__" in path:
        return
    name = RANDOM.sub("*", path[len(folder) + 1 :])
    operation = event.removeprefix("os.")
    key = (os.getpid(), operation, name)
    counts[key] += 1
    plan = json.loads(os.environ["RONDO_FAULT"])
    point = {"operation": operation, "path": name, "occurrence": counts[key]}
    if "trace" in plan:
        line = json.dumps({"victim": role(), **point}) + "\n"
        with open(plan["trace"], "a") as trace:
            trace.write(line)
    if {"victim": role(), **point}.items() <= plan.items() and not os.path.exists(plan["struck"]):
        with open(plan["struck"], "x") as struck:
            struck.write(f"{os.getpid()} {' '.join(sys.argv)}\n")
        if plan["do"] == "EMPTIED":
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        if plan["do"] in ("SIGKILL", "EMPTIED"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, plan["do"]), os.strerror(getattr(errno, plan["do"])), path)


def guarded(event: str, path: object) -> None:
    """`strike`, but not for its own files."""
    if getattr(busy, "busy", False):
        return
    busy.busy = True
    try:
        strike(event, os.fsdecode(path))  # type: ignore[arg-type]
    finally:
        busy.busy = False


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if (event != "open" and event not in TARGETS) or "RONDO_FAULT" not in os.environ:
        return
    path = changed_path(event, arguments)
    if isinstance(path, (str, bytes, os.PathLike)):
        appends = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_APPEND
        guarded("append" if appends else event, path)


def fsync(descriptor: int, real=os.fsync) -> None:  # type: ignore[no-untyped-def]
    """os.fsync, which has no audit event."""
    if "RONDO_FAULT" in os.environ:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        guarded("fsync", os.readlink(f"/proc/self/fd/{number}"))
    real(descriptor)


def seconds_later() -> int:
    with open(os.environ["RONDO_CLOCK"]) as file:
        return int(file.read() or 0)


if "RONDO_CLOCK" in os.environ:
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + seconds_later()
    time.time_ns = lambda: real_time_ns() + seconds_later() * 10**9
sys.addaudithook(hook)
os.fsync = fsync
