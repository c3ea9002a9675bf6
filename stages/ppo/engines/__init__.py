"""PPO by an engine that others made, as a job of a Ray cluster (docs/engines.md).

The engine runs in an environment of its own. Rondo writes its command and its prompts, follows its
metrics, and selects the policy among its checkpoints as after a PPO run of its own.
"""

from pathlib import Path

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
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
