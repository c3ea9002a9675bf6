"""What the stages of a run need on this machine: time, memory and disk."""

from flows.core.addresses import split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.services import LogLine
from flows.execution import estimate, gpus, machine
from stages.lib.core.params import SHARED, Params
from stages.lib.core.params.policy import Engine
from stages.lib.core.ray.cluster import RayCluster
from stages.ppo.engines.check import check_on_cluster
from stages.ppo.engines.job import check_installed


def check(params: Params, addresses: list[str], waiting: set[str], log: LogLine) -> None:
    """Log what the stages of `waiting` need; `addresses` are all stages of the run.

    Raises:
        BadInput: an engine refuses its options.
        RondoError: there is no room for their models, on disk or in memory, too few GPUs, or an
            engine's metrics could not be read.
        Unreachable: the Ray cluster of a stage or of an engine does not answer.
    """
    gpus.check_enough(params, waiting)
    stages = {split_address(address)[0] for address in waiting}
    there = [stage for stage in SHARED if stage in stages and params.cluster(stage)]
    by_engine = params.ppo.engine is not Engine.local and "ppo" in stages
    if by_engine:
        check_installed()
        there.append(f"ppo by {params.ppo.engine.value}")
    if there:
        cluster = RayCluster(str(params.launcher.ray_address))
        log(f"on Ray {cluster.version} at {cluster.address}: {', '.join(there)}")
        if by_engine:
            round_ = next(name for name in params.rounds if f"ppo@{name}" in waiting)
            log(check_on_cluster(params, round_, cluster))
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
