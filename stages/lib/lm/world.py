"""Several processes that share the work of one stage (`launcher.processes`), one per GPU.

Every process runs the whole stage, with the same inputs and the same random numbers. What takes
time is shared out (`share`): sampling, scoring, forward and backward passes. Its results are
gathered, so that each process goes on with all of them and comes to the same decisions. What must
happen once, i.e. judges, reward servers and files, happens in the main process.

In a stage of one process, each function returns what it is given.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stages.lib.core.errors import RondoError
from stages.lib.core.launch import RUN_AGAIN, is_launched

# A judge in the main process may take hours, and a process that ends is seen at once by the others.
TIMEOUT = timedelta(days=2)
GRACE_SECONDS = 5.0

Item = TypeVar("Item")
_alone = False  # in `in_main`: this process works while the others wait


def join() -> None:
    """Join the processes that were started together (stages/lib/core/launch.py), if there are any.
    Each one has one GPU by now, if the machine has any.
    """
    if is_launched() and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)


def size() -> int:
    """Number of processes that work together."""
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Number of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def is_main() -> bool:
    """Whether this process writes files and calls judges and servers."""
    return rank() == 0


def share(count: int) -> range:
    """This process's part of `count` items: consecutive ones, as many as others have, or one more
    or less.
    """
    return range(count * rank() // size(), count * (rank() + 1) // size())


@contextmanager
def _others() -> Iterator[None]:
    """An exchange with the other processes.

    Raises:
        RondoError: one of them has ended, or they do not reach each other.
    """
    try:
        yield
    except RuntimeError as error:
        # the agent, which has seen it end, and says how, ends this process meanwhile
        time.sleep(GRACE_SECONDS)
        raise RondoError(
            f"another process of this stage has ended, or cannot be reached ({error}). Next: read "
            f"its message, and {RUN_AGAIN}"
        ) from error


@contextmanager
def exchanges() -> Iterator[None]:
    """A block whose computations are exchanges with other processes: passes of sharded models.

    An error in it waits before it is shown. If it is that another process has ended, the agent ends
    this one meanwhile, as in the exchanges of this module.
    """
    try:
        yield
    except RuntimeError:
        if size() > 1:
            time.sleep(GRACE_SECONDS)
        raise


def wait() -> None:
    """Wait until all processes are here."""
    if size() > 1:
        with _others():
            dist.barrier()


def gather(items: Sequence[Item]) -> list[Item]:
    """The items of all processes, one process after the other. All of them must call it."""
    if size() == 1:
        return list(items)
    parts: list[Any] = [None] * size()
    with _others():
        dist.all_gather_object(parts, list(items))
    return list(chain(*parts))


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, which has the same bits in each.

    The tensors have one dtype and device. All processes must call it with the same shapes.
    """
    if size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])  # one message, not hundreds
    with _others():
        dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def any_of(flag: bool) -> bool:
    """Whether the flag of any process is true. All processes must call it."""
    if size() == 1:
        return flag
    number = torch.tensor(int(flag))
    with _others():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def in_main(function: Callable[[], Item]) -> Item:
    """The result of a function that the main process calls alone; if it raises, all raise."""
    global _alone
    if size() == 1:
        return function()
    value_and_error: list[Any] = [None, None]
    if is_main():
        _alone = True  # it may sample or score, which is not shared out then
        try:
            value_and_error[0] = function()
        except RondoError as error:
            value_and_error[1] = error
        except Exception as error:  # e.g. of a user's judge; it may be impossible to send
            value_and_error[1] = RondoError(f"{type(error).__name__}: {error}")
            value_and_error[1].__cause__ = error
        finally:
            _alone = False
    with _others():
        dist.broadcast_object_list(value_and_error)
    result, raised = value_and_error
    if raised:
        raise raised
    return cast(Item, result)


def check_equal(what: str, metrics: Mapping[str, Any]) -> None:
    """Check that all processes have the same numbers.

    Raises:
        RondoError: they do not, so they no longer train the same model. Names those that differ.
    """
    values = gather([[repr(value) for value in metrics.values()]])
    columns = dict(zip(metrics, zip(*values, strict=True), strict=True))
    differ = [
        f"{name} ({', '.join(reprs)})" for name, reprs in columns.items() if len({*reprs}) > 1
    ]
    if differ:
        raise RondoError(
            f"the {size()} processes of this stage differ in {what}: {'; '.join(differ)}. They no "
            "longer train the same model. Next: set launcher.processes to 1, and check that "
            "their GPUs and libraries are of one kind"
        )
