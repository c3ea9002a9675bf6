"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end a command in order, once, and in time.

The first signal prints a line and raises `Interrupted` in the main thread. Later signals are
ignored: a second Ctrl-C would interrupt the code that records the end.
"""

import _thread
import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """One of SIGNALS arrived. Libraries treat it as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as shells report it


def raise_at_signals(line: str, seconds: float | None = None) -> None:
    """Raise `Interrupted` at the first of SIGNALS. Call it in the main thread, before the libraries
    are imported whose exit handlers have to run.

    Args:
        line: is printed after the signal's name.
        seconds: after which the process ends, however far the code has come that handles the
            exception; None for no limit.
    """
    interrupts: list[Interrupted] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        interrupts.append(Interrupted(number))
        with suppress(OSError):  # the terminal is closed
            os.write(2, f"\nrondo: {interrupts[0]}: {line}\n".encode())
        if seconds is not None:
            # Not threading.Thread: the signal may have interrupted code that holds its locks.
            _thread.start_new_thread(_exit_after, (seconds, interrupts[0].exit_code))
        raise interrupts[0]

    def end() -> None:
        # Python would free its modules now. On a busy machine this took 15 s, and the thread of
        # `_exit_after` does not run any more.
        if interrupts:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the terminal is closed
                    stream.flush()
            os._exit(interrupts[0].exit_code)

    if seconds is not None:
        atexit.register(end)
    # SIGINT too: a shell ignores it for a process that it starts in the background. `nohup` ignores
    # SIGHUP, and means it.
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def ignore_signals() -> None:
    """Ignore SIGNALS from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_at_signals() -> None:
    """End the process at once at the next of SIGNALS, unless they are ignored.

    For the end of a process: an exception in an exit handler would print a traceback.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)
