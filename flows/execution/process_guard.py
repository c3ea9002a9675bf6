"""Run a command so that nothing of it outlives us: `python flows/execution/process_guard.py COMMAND
...`.

The guard leads a session of its own. It ends the whole session, politely first, when it is told to
(SIGTERM), when its parent dies however hard (Linux: PR_SET_PDEATHSIG), and when the command has
ended and left children behind.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE = ((signal.SIGINT, 3.0), (signal.SIGTERM, 2.0))  # seconds for each before SIGKILL


class Stopped(BaseException):
    """SIGTERM arrived."""


def start(command: list[str], **options: object) -> "subprocess.Popen[str]":
    """Start `command` under a guard; end it with `stop`. `options` go to Popen."""
    guarded = [sys.executable, __file__, str(os.getpid()), *command]
    return subprocess.Popen(
        guarded, start_new_session=True, text=True, stdin=subprocess.DEVNULL, **options
    )  # type: ignore[call-overload]


def stop(process: "subprocess.Popen[str]") -> None:
    """End a guarded command and all its children; returns within 6 s."""
    process.terminate()
    try:
        process.wait(sum(seconds for _, seconds in GRACE) + 1)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _stopped(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def _end(child: "subprocess.Popen[bytes]") -> None:
    for number, seconds in GRACE:
        signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
        try:
            child.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            continue
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _stopped)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before prctl
        return 1
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        code = child.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # what the command left behind
        return code
    except Stopped:
        _end(child)
        return 1


if __name__ == "__main__":
    sys.exit(main())
