"""What PPO by OpenRLHF needs on a cluster: GPU memory in each phase, RAM per node, and time.

All models are on all GPUs, by turns (docs/engines.md): policy and critic are sharded over all GPUs
and wait in RAM while it is not their turn, reference and reward model are sharded, and vLLM has
whole copies, each on `tensor_parallel` GPUs.

- A trained weight takes 16 bytes: weight and gradient in bfloat16, master weight and Adam's two
  moments in float32 (Rajbhandari et al. 2020, section 3.1). A frozen one takes 2.
- The weights of the layer that is computed, and of the next one, are gathered on each GPU.
- With gradient checkpointing, one state per token and layer is kept, and the activations of one
  layer. Logits are float32, with their gradient in float32 and bfloat16.

docs/scale.md compares the result with published runs. Nothing here was measured by Rondo.
"""

import math
from dataclasses import dataclass, replace

from flows.execution.memory import Limits, MemoryModel
from flows.execution.model_shape import ModelShape
from flows.execution.text_lengths import Batch
from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import LoraParams
from stages.ppo.engines.openrlhf import GPU_MEMORY_UTILIZATION

FROZEN, TRAINED, LOGIT = 2, 16, 10  # bytes
RESERVED = 0.1  # share of a GPU for the CUDA context, NCCL and fragments
SEQUENCES = 16  # that vLLM has to hold at once, at least
# GPU-seconds per response and 1e9 weights of the policy, on A800 with up to 2,048 tokens: the
# median of four published runs, which took 1.05 to 2.05 (docs/scale.md)
GPU_SECONDS, GPU_SECONDS_TOKENS, GPU_SECONDS_FACTOR = 1.43, 2048, 1.5


@dataclass(frozen=True)
class Cluster:
    """gpu_bytes: memory of one GPU."""

    nodes: int
    gpus_per_node: int
    gpu_bytes: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def usable(self) -> float:
        """Bytes of one GPU that models and activations can have."""
        return self.gpu_bytes * (1 - RESERVED)


@dataclass(frozen=True)
class Workload:
    """prompt, response: tokens at most. batch, mini_batch: episodes of a rollout, and of an
    optimizer step. micro_batch: of one GPU at once. episodes: of the whole run.
    """

    prompt: int
    response: int
    batch: int
    mini_batch: int
    micro_batch: int
    episodes: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Plan:
    """phases: bytes of one GPU by phase and part. ram: bytes per node. sequences: that one vLLM
    engine holds at once. hours: of the training.
    """

    cluster: Cluster
    work: Workload
    tensor_parallel: int
    phases: dict[str, dict[str, float]]
    ram: float
    sequences: int
    hours: float

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.cluster.usable and self.sequences >= SEQUENCES


def parse_cluster(text: str) -> Cluster:
    """
    Raises:
        BadInput: it is neither GPUS x GB nor NODES x GPUS x GB.

    >>> parse_cluster("2x8x80")
    Cluster(nodes=2, gpus_per_node=8, gpu_bytes=80000000000.0)
    """
    parts = text.lower().split("x")
    try:
        *counts, gigabytes = [float(part) for part in parts]
        nodes, gpus = [1, *map(int, counts)][-2:]
        exact = len(parts) in (2, 3) and [*map(str, map(int, counts))] == parts[:-1]
        if exact and min(nodes, gpus) >= 1 and 0 < gigabytes < 10_000:
            return Cluster(nodes, gpus, gigabytes * 1e9)
    except (ValueError, IndexError):
        pass
    raise BadInput(
        f"--gpus {text}: expected GPUs x GB of one, e.g. 8x80, or nodes x GPUs per node x GB, e.g. "
        "2x8x80"
    )


def make_plan(shape: ModelShape, cluster: Cluster, work: Workload) -> Plan:
    """The plan for a cluster, with as many episodes per GPU at once as fit, and `work.micro_batch`
    at most. The episodes of an optimizer step become a multiple of the GPUs, and those of a rollout
    a multiple of the former.

    Args:
        shape: of policy, critic, reference and reward model.
    """
    step = cluster.gpus * math.ceil(work.mini_batch / cluster.gpus)
    batch = step * max(round(work.batch / step), 1)
    micro, plans = work.micro_batch, []
    while micro:
        if step % (micro * cluster.gpus) == 0:
            each = replace(work, batch=batch, mini_batch=step, micro_batch=micro)
            plans.append(_plan(shape, cluster, each))
        micro //= 2
    return next((plan for plan in plans if plan.fits), plans[-1])


def _plan(shape: ModelShape, cluster: Cluster, work: Workload) -> Plan:
    size = _tensor_parallel(shape, cluster)
    cache = GPU_MEMORY_UTILIZATION * cluster.gpu_bytes - shape.weights * FROZEN / size
    per_sequence = shape.cached_numbers * FROZEN * work.tokens / size
    sampling = {"weights": shape.weights * FROZEN / size, "cache": max(cache, 0.0)}
    training = _sharded(shape, cluster, TRAINED) | _activations(shape, work)
    critic = training | {"logits": 0.0}  # one value per token
    scoring = _sharded(shape, cluster, FROZEN) | _forward(shape, work)
    engines = cluster.gpus_per_node / size
    return Plan(
        cluster,
        work,
        size,
        {
            "sampling (vLLM)": sampling,
            "scores of reward model and reference": scoring,
            "training of the policy": training,
            "training of the critic": critic,
        },
        ram=2 * shape.weights * TRAINED / cluster.nodes + engines * shape.weights * FROZEN,
        sequences=max(int(cache / per_sequence), 0),
        hours=hours(shape, cluster, work),
    )


def smallest_that_fits(shape: ModelShape, cluster: Cluster, work: Workload) -> Plan | None:
    """The plan with the fewest GPUs of this size: 1, 2, 4, 8 on one node, then whole nodes; None if
    64 nodes are too few.
    """
    one_node = [replace(cluster, nodes=1, gpus_per_node=count) for count in (1, 2, 4, 8)]
    more = [replace(cluster, nodes=count, gpus_per_node=8) for count in range(2, 65)]
    plans = (make_plan(shape, each, work) for each in one_node + more)
    return next((plan for plan in plans if plan.fits), None)


def hours(shape: ModelShape, cluster: Cluster, work: Workload) -> float:
    """From published times, in proportion to weights, tokens and GPUs."""
    per_response = GPU_SECONDS * shape.weights / 1e9 * work.tokens / GPU_SECONDS_TOKENS
    return work.episodes * per_response / cluster.gpus / 3600


def _tensor_parallel(shape: ModelShape, cluster: Cluster) -> int:
    """GPUs of one vLLM engine: as few as leave half of its memory to keys and values."""
    size, room = 1, GPU_MEMORY_UTILIZATION * cluster.gpu_bytes / 2
    while shape.weights * FROZEN / size > room and cluster.gpus_per_node % (2 * size) == 0:
        size *= 2
    return size


def _sharded(shape: ModelShape, cluster: Cluster, per_weight: int) -> dict[str, float]:
    layer = sum(inputs * outputs for inputs, outputs in shape.matrices)
    return {
        "weights": shape.weights * per_weight / cluster.gpus,
        "gathered": 2.0 * FROZEN * max(layer, shape.embedding_weights),
    }


def _activations(shape: ModelShape, work: Workload) -> dict[str, float]:
    model = _model(shape)
    batch = Batch(work.micro_batch, work.micro_batch * work.tokens, work.tokens)
    full = LoraParams(r=0)
    return {
        "activations": model.kept(batch, full, True) + model.one_layer(batch, full, True),
        "logits": float(batch.tokens * shape.vocabulary * LOGIT),
    }


def _forward(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Of the reference, whose logits are kept for no gradient."""
    tokens = work.micro_batch * work.tokens
    return {
        "activations": tokens * _model(shape).kept_per_token(),
        "logits": float(tokens * shape.vocabulary * (FROZEN + 4)),
    }


def _model(shape: ModelShape) -> MemoryModel:
    return MemoryModel(shape, FROZEN, "cuda", "flash_attention_2", Limits(0, 0.0, 0))
