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
from contextlib import suppress

PR_SET_PDEATHSIG = 1
GRACE = ((signal.SIGINT, 3.0), (signal.SIGTERM, 2.0))  # signal, and seconds to wait after it


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


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # The guard takes these signals from `sigwait` alone: none is lost while the command starts.
    waited_for = {signal.SIGTERM, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl took effect
        return 1
    try:
        child = subprocess.Popen(
            command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while child.poll() is None:
        if signal.sigwait(waited_for) == signal.SIGTERM:
            end_session(child)
    os.killpg(0, signal.SIGTERM)  # children that the command left behind
    # a negative code would end this process with 256 less the signal
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_session(child: "subprocess.Popen[bytes]") -> None:
    """Send each signal of GRACE in turn, then SIGKILL, which ends the guard too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, seconds in GRACE:
        os.killpg(0, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
