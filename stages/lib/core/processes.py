"""How a stage is started: as one process, as several on this machine, or on a Ray cluster."""

import os
import sys

from stages.lib.core.files import work_dir
from stages.lib.core.launch import end_with_agent, is_launched, launch, rank
from stages.lib.core.params import Params


def share_out(module: str, arguments: list[str], params: Params, stage: str, round_: str) -> None:
    """Run `python -m module` as the processes that share the work of a stage, if there are several
    or if they are on a cluster (`launcher`).

    The process that calls this first starts them, waits for them, and exits with their exit code.
    In each of them this returns: of their standard outputs only the first one's is kept.

    Raises:
        RondoError: as `launch` and `launch_on_cluster`.
    """
    processes, cluster = params.processes(stage), params.cluster(stage)
    if is_launched():
        end_with_agent()
        if rank():
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    elif cluster:
        from stages.lib.core.ray.launch import launch_on_cluster  # imports requests

        folder = work_dir(round_, stage) / "ray" / module
        address = f"{stage}@{round_}"
        sys.exit(launch_on_cluster(cluster, module, arguments, processes, address, folder))
    elif processes > 1:
        sys.exit(launch(module, arguments, processes))
