"""What the stages of a run need on this machine: time, memory and disk."""

import math
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from rich.filesize import decimal

from flows.core.addresses import split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.services import TRACKING_URI, LogLine
from flows.execution import gpus, memory
from flows.execution.dvc_stages import open_repo
from flows.execution.model_shape import ModelShape, read_shape
from stages.lib.core.errors import RondoError
from stages.lib.core.files import WORK, read_json, work_dir
from stages.lib.core.params import SHARED, Params
from stages.lib.core.params.policy import OFFLINE, Algorithm, Engine
from stages.lib.core.params.tracking import Upload
from stages.lib.core.ram import ram_bytes
from stages.lib.core.ray.cluster import RayCluster
from stages.ppo.common.episodes import planned_updates
from stages.ppo.engines import check_on_cluster
from stages.ppo.engines.job import check_installed

ADAPTER_BYTES = 4  # per weight: adapters are float32
# Of PPO's resume state, per fully trained weight: the weight, its float32 master, Adam's moments
STATE_BYTES = 2 + 4 + 2 * 4


def check(params: Params, addresses: list[str], waiting: set[str], log: LogLine) -> None:
    """Log what the stages of `waiting` need; `addresses` are all stages of the run.

    Raises:
        BadInput: an engine refuses its options.
        OutOfMemory: the weights and states of a stage do not fit.
        RondoError: there is no room for the models on disk, there are too few GPUs, or an engine's
            metrics could not be read.
        Unreachable: the Ray cluster of a stage or of an engine does not answer.
    """
    gpus.check_enough(params, waiting)
    stages = list(dict.fromkeys(split_address(name)[0] for name in addresses if name in waiting))
    check_cluster(params, stages, waiting, log)
    if not waiting:
        log(f"to do: nothing; all {len(addresses)} stages are up to date")
        return
    rounds = {split_address(name)[1] for name in addresses} - {""}
    log(
        f"to do: {len(waiting)} of {len(addresses)} stages of {len(rounds)} round(s); the others "
        "are up to date"
    )
    with bookkeeping("reading the time of earlier runs", log):
        log_times([address for address in addresses if address in waiting], log)
    shape = read_shape(params.assets.model)
    if shape is None:
        log(
            f"warning: the size of assets.model {params.assets.model} is not known (it is no local "
            "folder, and the hub cannot be reached): memory and disk are not checked"
        )
        return
    here = [stage for stage in stages if not params.cluster(stage)]
    if needed := memory.check(params, here, shape, *device_memory()):
        sizes = ", ".join(f"{stage} {size / 1e9:.1f}" for stage, size in needed.items())
        log(f"GB of memory at least, for weights, gradients and Adam's states: {sizes}")
    check_disk(params, waiting, shape, log)


def check_cluster(params: Params, stages: Iterable[str], waiting: set[str], log: LogLine) -> None:
    """Log what would run on the Ray cluster.

    Raises:
        Unreachable: it does not answer.
        BadInput: an engine refuses its options.
        RondoError: an engine's metrics could not be read.
    """
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


def log_times(addresses: list[str], log: LogLine) -> None:
    """Log the minutes that the stages took last time; nothing if none of them ran here."""
    known = {name: taken for name in addresses if (taken := last_seconds(name)) is not None}
    if known:
        minutes = ", ".join(f"{name} {taken / 60:.1f}" for name, taken in known.items())
        log(f"minutes when they ran last: {sum(known.values()) / 60:.0f}: {minutes}")
    if known and len(known) < len(addresses):
        log(f"not measured yet: {', '.join(name for name in addresses if name not in known)}")


def last_seconds(address: str) -> float | None:
    """The seconds that a stage took when it ran last in this folder: in its round, else in any.

    flows/tracking/provenance.py writes them.
    """
    stage, round_ = split_address(address)
    own = work_dir(round_, stage) / "made.json"
    files = [own] if own.exists() else WORK.glob(f"*/{stage}/{own.name}")
    runs = [run for path in files for run in read_json(path, f"rm {path}").values()]
    return max(runs, key=lambda run: str(run["ended"]))["seconds"] if runs else None


def device_memory() -> tuple[float, bool]:
    """Bytes of the smallest GPU that stages can use, infinite if it cannot be read; without a GPU,
    of RAM. And whether it is a GPU's.
    """
    names = gpus.visible_gpus()
    if not names:
        return float(ram_bytes()), False
    query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", f"--id={','.join(names)}", *query]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return math.inf, True
    return min(map(float, answer.split())) * 2**20, True


def check_disk(params: Params, waiting: set[str], shape: ModelShape, log: LogLine) -> None:
    """Log the disk that the models of the stages of `waiting` take: in their folders, in DVC's
    cache and, if they are uploaded to the project's MLflow, there.

    Raises:
        RondoError: less is free.
    """
    model, ppo = float(shape.weights * memory.bytes_per_weight(params)), params.ppo
    copies = 1 if _cache_is_linked() else 2
    uploaded = set() if os.environ.get(TRACKING_URI) else set(params.mlflow.upload)
    checkpoints = 0 if params.algorithm in OFFLINE else planned_updates(ppo) // ppo.save_updates
    trained = [ppo.lora, *([ppo.critic_lora] if params.algorithm is Algorithm.ppo else [])]
    policy, *critic = (
        float(shape.adapter_weights(lora) * ADAPTER_BYTES) if lora.r else model for lora in trained
    )
    reward_models = params.reward.ensemble + (params.reward.judge_share > 0)

    def kept(size: float, kind: Upload) -> float:
        return size * (copies + (kind in uploaded))

    sizes = {
        "assets": model * copies,
        "sft": kept(model, Upload.sft),
        "reward": kept(model * reward_models, Upload.reward),
        "ppo": kept(policy, Upload.policy)
        + kept(policy * checkpoints, Upload.checkpoints)
        + copies * sum(critic)
        + STATE_BYTES * shape.weights * sum(lora.r == 0 for lora in trained),
    }
    needed = sum(sizes.get(split_address(address)[0], 0.0) for address in waiting)
    free = free_bytes()
    log(f"disk: {needed / 1e9:.1f} GB of models, {free / 1e9:.1f} GB free")
    if needed > free:
        raise RondoError(
            f"the models of the {len(waiting)} stages to run take about {decimal(int(needed))} of "
            f"disk, and {decimal(free)} are free in {Path.cwd()}: `rondo gc --cache` removes what "
            "nothing refers to; fewer checkpoints (ppo.save_updates) and uploads (mlflow.upload) "
            "take less (docs/running.md, Disk)"
        )


def free_bytes() -> int:
    """Free bytes where the working directory is, which the runs' folders share with .rondo."""
    return shutil.disk_usage(Path.cwd()).free


def _cache_is_linked() -> bool:
    """Whether an output and DVC's cache share one file. DVC's default is a reflink, or else, on
    most file systems, a copy.
    """
    with open_repo() as repo:
        return not {"hardlink", "symlink"}.isdisjoint(repo.cache.local.cache_types)
