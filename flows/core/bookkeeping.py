"""Code that only records or shows results must neither fail a stage nor lose its results."""

from collections.abc import Iterator
from contextlib import contextmanager

from flows.core.services import LogLine


@contextmanager
def bookkeeping(subject: str, log: LogLine) -> Iterator[None]:
    """Log an error of the block instead of raising it.

    Args:
        subject: what the block does, for the message.
    """
    try:
        yield
    except Exception as error:
        log(f"{subject} failed ({type(error).__name__}: {error}); the run continues")
