"""What the stages of a run need on this machine: time, memory and disk."""

from flows.core.bookkeeping import bookkeeping
from flows.core.services import LogLine
from flows.execution import estimate, gpus, machine
from stages.lib.core.params import Params


def check(params: Params, addresses: list[str], waiting: set[str], log: LogLine) -> None:
    """Log what the stages of `waiting` need; `addresses` are all stages of the run.

    Raises:
        RondoError: there is no room for their models, on disk or in memory, or too few GPUs.
    """
    gpus.check_enough(params, waiting)
    disk_needed = estimate.disk_bytes(params, waiting)
    estimate.check_disk(disk_needed, waiting)
    here = sizes = None
    with bookkeeping("the measurement of this machine", log):
        here = machine.measure() if waiting else None
    if here:
        sizes = estimate.check_memory(params, waiting, here)
    with bookkeeping("the estimate of time", log):
        for line in estimate.report(params, addresses, waiting, disk_needed, here, sizes):
            log(line)
