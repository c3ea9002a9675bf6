"""The engine's own reading of its options before a run, by a short job of the Ray cluster."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from stages.lib.core.errors import RondoError
from stages.lib.core.files import WORK
from stages.lib.core.params import Params
from stages.lib.core.ray import job as ray_job
from stages.lib.core.ray.cluster import RayCluster
from stages.ppo.engines import make_job


def check_on_cluster(params: Params, round_: str, cluster: RayCluster) -> str:
    """Have the engine read the options of a round's job, before its models are there.

    Returns:
        A line that says so.

    Raises:
        BadInput: the engine refuses an option, or another version of it is installed.
        RondoError: the cluster cannot run the check, e.g. since it has not the project's folder.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="check-", dir=WORK) as folder:
        job, job_id = make_job(params, round_, Path(folder)), f"rondo-check-{uuid4().hex[:12]}"
        cluster.submit(job_id, job.check_command())
        try:
            while (state := cluster.job(job_id)) and not state.ended:
                time.sleep(ray_job.POLL_SECONDS)
        finally:
            cluster.stop(job_id)
        job.raise_refusal()
        if state is None or state.status != "SUCCEEDED":
            raise RondoError(
                f"the job {job_id} of {cluster.address}, in which {job.title} checks its options, "
                f"ended as {state}\n{job.last_lines()}\nNext: does the cluster see "
                f"{WORK.resolve()}, and is python3 there that of {job.title}'s environment?"
            )
    return f"{job.title} {job.version} there accepts its options"
