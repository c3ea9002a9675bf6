"""The disk that the models of a run take."""

import os
import shutil
from pathlib import Path

from flows.core.services import TRACKING_URI
from flows.execution.dvc_stages import open_repo
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm
from stages.lib.core.params.shared import LoraParams
from stages.lib.core.params.tracking import Upload

ADAPTER_BYTES = 4  # per weight: adapters are float32
# Of the resume state, per fully trained weight: the weight, its float32 master, two moments of Adam
STATE_BYTES = 2 + 4 + 2 * 4


def model_bytes(
    params: Params, weights: float, bytes_per_weight: int, layers: int, checkpoints: int
) -> dict[str, float]:
    """Bytes of the models of each stage: in its folder, in DVC's cache and, if they are uploaded to
    the project's MLflow, there.

    Args:
        weights: of the base model, with `bytes_per_weight` each, in `layers` layers.
        checkpoints: that PPO writes, without the policy that it selects.
    """
    model, ppo = weights * bytes_per_weight, params.ppo
    copies = 1 if _cache_is_linked() else 2
    uploaded = set() if os.environ.get(TRACKING_URI) else set(params.mlflow.upload)
    # A base of d = sqrt(weights / 12 / layers) has matrices of 12 d^2 weights per layer, and
    # adapters of about 24 r d (Hu et al. 2021, section 4.2)
    width = (weights / 12 / layers) ** 0.5

    def trained(lora: LoraParams) -> float:
        if lora.r == 0:
            return model
        return 24 * lora.r * width * min(lora.top_layers or layers, layers) * ADAPTER_BYTES

    def kept(size: float, kind: Upload) -> float:
        return size * (copies + (kind in uploaded))

    roles = [ppo.lora, *([ppo.critic_lora] if params.algorithm is Algorithm.ppo else [])]
    policy, *critic = map(trained, roles)
    members = params.reward.ensemble + (params.reward.judge_share > 0)
    return {
        "assets": model * copies,
        "sft": kept(model, Upload.sft),
        "reward": kept(model * members, Upload.reward),
        "ppo": kept(policy, Upload.policy)
        + kept(policy * checkpoints, Upload.checkpoints)
        + copies * sum(critic)
        + STATE_BYTES * weights * sum(lora.r == 0 for lora in roles),
    }


def _cache_is_linked() -> bool:
    """Whether an output and DVC's cache share one file. DVC's default is a reflink, or else, on
    most file systems, a copy.
    """
    with open_repo() as repo:
        return not {"hardlink", "symlink"}.isdisjoint(repo.cache.local.cache_types)


def free_bytes() -> int:
    """Free bytes where the working directory is, which the runs' folders share with .rondo."""
    return shutil.disk_usage(Path.cwd()).free
