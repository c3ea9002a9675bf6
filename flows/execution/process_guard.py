"""Run a command whose processes all end with it, and with its parent.

Usage: `python flows/execution/process_guard.py PARENT_PID COMMAND ...`. The guard leads a session
of its own. It ends all processes of the session if it gets SIGTERM, if its parent dies, even by
SIGKILL (Linux: PR_SET_PDEATHSIG), or if the command ends and leaves children behind. Processes get
SIGINT and SIGTERM before SIGKILL, so that they can clean up.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE = ((signal.SIGINT, 3.0), (signal.SIGTERM, 2.0))  # signal, and seconds to wait after it


class Stopped(BaseException):
    """The guard got SIGTERM."""


def start(command: list[str], **options: object) -> "subprocess.Popen[str]":
    """Start `command` under a guard; `stop` ends it.

    Args:
        options: are passed to Popen.
    """
    guarded = [sys.executable, __file__, str(os.getpid()), *command]
    return subprocess.Popen(
        guarded, start_new_session=True, text=True, stdin=subprocess.DEVNULL, **options
    )  # type: ignore[call-overload]


def stop(process: "subprocess.Popen[str]") -> None:
    """End a guarded command and all its children; takes at most 6 s."""
    process.terminate()
    try:
        process.wait(sum(seconds for _, seconds in GRACE) + 1)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Handler:
    """Raises Stopped at SIGTERM, once there is a command that can be ended: raised while it is
    started, the exception would leave it behind.
    """

    got_signal = has_command = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.got_signal = True
        if self.has_command:
            raise Stopped


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the session: each signal of GRACE in turn, then SIGKILL, which ends the guard too."""
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
    parent, command, handler = int(sys.argv[1]), sys.argv[2:], _Handler()
    signal.signal(signal.SIGTERM, handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl took effect
        return 1
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        handler.has_command = True
        if handler.got_signal:
            raise Stopped
        code = child.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # children that the command left behind
        # a negative code would end this process with 256 less the signal
        return code if code >= 0 else 128 - code
    except Stopped:
        _end(child)
        return 1


if __name__ == "__main__":
    sys.exit(main())
