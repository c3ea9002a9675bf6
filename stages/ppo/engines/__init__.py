"""PPO by an engine that others made, as a job of a Ray cluster (docs/engines.md).

The engine runs in an environment of its own. Rondo writes its command and its prompts, follows its
metrics, and selects the policy among its checkpoints as after a PPO run of its own.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from stages.lib.core.errors import RondoError
from stages.lib.core.files import WORK, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.ray import job as ray_job
from stages.lib.core.ray.cluster import RayCluster
from stages.ppo.engines.job import EngineJob
from stages.ppo.engines.nemo_rl import NemoRlJob
from stages.ppo.engines.openrlhf import OpenRlhfJob
from stages.ppo.engines.verl import VerlJob

JOBS: dict[str, type[EngineJob]] = {kind.name: kind for kind in (OpenRlhfJob, VerlJob, NemoRlJob)}


def make_job(params: Params, round_: str, folder: Path) -> EngineJob:
    """The job of a round, in the folder of its run.

    Raises:
        BadInput: `ppo.engine_options` or the batches do not suit the engine.
    """
    sft, reward = (stage_dir(round_, stage) / "model" for stage in ("sft", "reward"))
    job = JOBS[params.ppo.engine.value](params, folder / "engine", sft, reward)
    job.check()
    return job


def check_on_cluster(params: Params, round_: str, cluster: RayCluster) -> str:
    """Have the engine read the options of a round's job, before its models are there, by a short
    job of the cluster.

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
