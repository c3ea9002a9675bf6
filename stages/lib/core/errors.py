"""Typed errors. Each message names the file, line or key, what was expected, and the next step."""

import errno
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError


class RondoError(Exception):
    """A stage cannot continue. `exit_code` is the exit code of its process."""

    exit_code = 1


class BadInput(RondoError):
    """The user's params, data or model are invalid."""

    exit_code = 2


class Diverged(RondoError):
    """A loss, gradient or score is not finite. The optimiser step was not applied."""


class RewardsFailed(RondoError):
    """A reward of `ppo.rewards` failed for too many responses, or another model is now behind its
    address. No update was made from its results.
    """


class GateFailed(RondoError):
    """A quality gate failed. The message contains the numbers and the next step."""

    exit_code = 3


class Unreachable(RondoError):
    """The network or a remote server did not answer. A retry may succeed."""

    exit_code = 4


class StorageFailed(RondoError):
    """The disk is full, read-only or failing. Nothing that was complete is lost."""

    exit_code = 5


class OutOfMemory(RondoError):
    """The memory of the GPU or of the machine does not suffice."""

    exit_code = 6


AGAIN = "then run the same command again: it goes on from the last complete files"
STORAGE_ADVICE = {
    errno.ENOSPC: f"free disk space or inodes (`rondo gc`, `df`, `df -i`), {AGAIN}",
    errno.EDQUOT: f"free space within your quota (`rondo gc`, `quota`), {AGAIN}",
    errno.EROFS: f"mount the file system for writing, {AGAIN}",
    errno.EIO: f"look for the disk's errors (`dmesg`), {AGAIN}",
}
# how Python and libraries in Rust (safetensors) print an errno
PRINTED_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
PRINTED_BY_SQLITE = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
    "disk I/O error": errno.EIO,
}


def sqlite_errnos(text: str) -> list[int]:
    """The errors of the disk that SQLite has printed."""
    return [number for words, number in PRINTED_BY_SQLITE.items() if words in text]


def storage_advice(text: str) -> str | None:
    """The next step after a disk's error in a message of Python or a library; None: it has none."""
    numbers = [int(first or second) for first, second in PRINTED_ERRNO.findall(text)]
    numbers += sqlite_errnos(text)
    return next((STORAGE_ADVICE[number] for number in numbers if number in STORAGE_ADVICE), None)


# Keys that lower the peak of memory of a stage
CHECKPOINTING = "set {}.gradient_checkpointing to true"
LESS_MEMORY = {
    **{
        stage: f"lower {stage}.per_device_train_batch_size, and raise "
        f"{stage}.gradient_accumulation_steps as much, or {CHECKPOINTING.format(stage)}"
        for stage in ("sft", "reward")
    },
    "ppo": "lower ppo.micro_batch_size (of algorithm dpo or best_of_n, its "
    f"per_device_train_batch_size), or {CHECKPOINTING.format('ppo')}",
    "prepare": "lower prepare.max_rows",
    "annotate": "lower annotate.samples",
    "battery": "lower reward.ensemble or ppo.response_length",
    "evaluate": "lower reward.ensemble or ppo.response_length",
    "capability": "lower capability.batch_size",
    "replay": "lower reward.ensemble or ppo.response_length",
}
# of Python, of torch on a GPU, and of torch on a CPU
PRINTED_NO_MEMORY = re.compile(r"out of memory|can('t|not) allocate memory", re.IGNORECASE)


def memory_advice(who: str) -> str:
    """The next step after memory has run out; who: the address of a stage, or a program."""
    keys = LESS_MEMORY.get(who.partition("@")[0])
    steps = [*([keys] if keys else []), "choose a smaller assets.model", "end other programs"]
    return f"{', or '.join(steps)}; {AGAIN}"


def start_again(folder: Path) -> str:
    """The next step, in an error message, of a stage that cannot resume from its folder."""
    return f"Next: `rm -r {folder}`, and run the same command again: the stage starts again"


def print_failure(error: Exception, who: str) -> int:
    """Print a typed error in one line; returns its exit code.

    Raises:
        Exception: `error` itself, if it has no type (`typed`).
    """
    if (failure := typed(error, who)) is None:
        raise error
    print(f"{who}: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
    return failure.exit_code


def typed(error: BaseException, who: str = "") -> RondoError | None:
    """`error` itself if it has a type, or a StorageFailed or OutOfMemory if a disk's error or an
    allocation that failed led to it, also through a library's error; None: another error.

    Args:
        who: the address of a stage, whose keys the next step names, or a program.
    """
    if isinstance(error, RondoError):
        return error
    for cause in chain_of(error):
        if isinstance(cause, MemoryError) or PRINTED_NO_MEMORY.search(str(cause)):
            reason = str(cause).splitlines()[0] if str(cause) else "no memory is left"
            return OutOfMemory(f"{reason}. Next: {memory_advice(who)}")
        if advice := storage_advice(str(cause)):
            return StorageFailed(f"{str(cause).splitlines()[0]}. Next: {advice}")
    return None


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


SHOWN_ERRORS = 5  # of a validation: a file can have thousands


def format_validation_errors(error: ValidationError) -> str:
    """The first errors of a pydantic validation in one line, each as `key: reason`."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [
        f"{'.'.join(map(str, detail['loc'])) or 'JSON':.200}: {detail['msg']:.300}"
        for detail in details[:SHOWN_ERRORS]
    ]
    return "; ".join([*shown, *and_more(len(details))])


def and_more(errors: int) -> list[str]:
    """[`and 3 more errors`] if more than SHOWN_ERRORS are to be shown, else []."""
    return [f"and {errors - SHOWN_ERRORS} more errors"] if errors > SHOWN_ERRORS else []
