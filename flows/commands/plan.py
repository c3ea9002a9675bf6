"""`rondo plan`: the GPU memory that each stage needs for a model, and settings that fit."""

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.config import KEEP, resolve
from flows.core.tables import filled, fitted_text, print_json, terminal_width
from flows.execution import memory
from flows.execution.model_shape import NAMED_SIZES, ModelShape, read_shape
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm, Engine, PpoParams

HEAD = "http://HEAD:8265"
RATES = ("learning_rate", "critic_learning_rate")  # of adapters and of all weights differ
GPU_COUNTS = (1, 2, 4, 8, *range(16, 513, 8))
USABLE = 0.9  # of a GPU; the rest is for the CUDA context, NCCL and fragments
VLLM_WEIGHTS = 0.3  # of a GPU, so that as much is left to keys and values of vLLM's 0.6


class Cluster(NamedTuple):
    """gpus: per node. bytes: of one GPU."""

    nodes: int
    gpus: int
    bytes: float

    @property
    def all_gpus(self) -> int:
        return self.nodes * self.gpus


def print_plan(model: str, gpus: str, preset: str, settings: list[str], as_json: bool) -> None:
    """Print the answer of `rondo plan`; as JSON: the weights, and the `proposal`s by title.

    Raises:
        BadInput: the model is not known, the GPUs are no numbers, or a setting is wrong.
    """
    cluster = parse_cluster(gpus)
    shape = NAMED_SIZES.get(model.lower()) or read_shape(model)
    if shape is None:
        raise BadInput(
            f"--model {model}: no folder, no size ({', '.join(NAMED_SIZES)}), and its "
            "config.json is neither in the cache nor can the hub be reached"
        )
    parts = (setting.partition("=") for setting in settings)
    given = {key.strip(): value for key, _, value in parts}
    if Path(model).is_dir() or "@" in model:
        given.setdefault("assets.model", model)
    address = [] if preset == KEEP else [f"launcher.ray_address={HEAD}"]
    params = resolve(preset, None, [*address, *settings])
    if params.algorithm is not Algorithm.ppo:
        raise BadInput(f"algorithm {params.algorithm.value}: expected ppo, the one with a plan")
    if params.ppo.engine is Engine.local:
        changed: dict[str, dict[str, Any]] = {"these settings": {}}
    else:
        title = f"all weights, by {params.ppo.engine.value} on all GPUs"
        changed = {title: on_all_gpus(params, shape, cluster)}
    changed["adapters, by Rondo"] = with_adapters(params, given)
    proposals = {
        title: proposal(
            preset, given | {key: as_yaml(value) for key, value in values.items()}, shape, cluster
        )
        for title, values in changed.items()
    }
    if as_json:
        return print_json({"weights": shape.weights, "proposals": proposals})
    width = terminal_width()
    description = (
        f"{model}: {shape.weights / 1e9:.2f}e9 weights; {cluster.nodes} node(s) with "
        f"{cluster.gpus} GPUs of {cluster.bytes / 1e9:.0f} GB, of which {USABLE:.0%} are used; "
        "calculated, never measured (docs/scale.md)"
    )
    print(filled(description, width))
    for title, one in proposals.items():
        print()
        print(filled(f"PPO of {title}; GB of the one GPU of each stage, at most:", width))
        print("\n".join(proposal_lines(one)))


def parse_cluster(text: str) -> Cluster:
    """
    Raises:
        BadInput: it is neither GPUS x GB nor NODES x GPUS x GB.

    >>> parse_cluster("2x8x80")
    Cluster(nodes=2, gpus=8, bytes=80000000000.0)
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)", text.lower())
    nodes, gpus, gigabytes = (float(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if not min(nodes, gpus, gigabytes):
        raise BadInput(
            f"--gpus {text}: expected GPUs x GB of one, e.g. 8x80, or nodes x GPUs per node x GB, "
            "e.g. 2x8x80"
        )
    return Cluster(int(nodes), int(gpus), gigabytes * 1e9)


def as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def proposal(
    preset: str, values: Mapping[str, str], shape: ModelShape, cluster: Cluster
) -> dict[str, Any]:
    """What the stages need with these values of settings.

    Returns:
        `gigabytes`: by stage, and `all` of it; `too_large`: the stages that do not fit; `command`,
        if the policy's training does, else `note` on what would; or only `error`: the settings do
        not go together.
    """
    settings = [f"{key}={value}" for key, value in values.items()]
    try:
        params = resolve(preset, None, settings)
    except BadInput as error:
        return {"error": str(error)}
    needed = memory.gpu_needs(params, shape, cluster.bytes, cluster.all_gpus)
    gigabytes = {
        stage: {name: size / 1e9 for name, size in (need._asdict() | {"all": sum(need)}).items()}
        for stage, need in needed.items()
    }
    large = [stage for stage, need in needed.items() if sum(need) > USABLE * cluster.bytes]
    answer: dict[str, Any] = {"gigabytes": gigabytes, "too_large": large}
    local = params.ppo.engine is Engine.local
    training = "ppo" if local else f"ppo by {params.ppo.engine.value}"
    if training not in large:
        words = [word for setting in settings for word in ("--set", setting)]
        answer["command"] = shlex.join(["rondo", "run", "--preset", preset, *words])
    elif not local:
        fewest = [n for n in GPU_COUNTS if engine_fits(params, shape, cluster.bytes, n, 1)]
        more = f"takes {fewest[0]} of these GPUs" if fewest else "needs larger GPUs or less text"
        answer["note"] = f"{training} {more}"
    return answer


def proposal_lines(proposed: Mapping[str, Any]) -> list[str]:
    """A `proposal` for a terminal."""
    if "error" in proposed:
        return [f"  these settings do not go together: {proposed['error']}"]
    table = Table("stage", *memory.Need._fields, "all", box=SIMPLE_HEAD)
    for stage, sizes in proposed["gigabytes"].items():
        table.add_row(stage, *(f"{size:.1f}" for size in sizes.values()))
    shown = fitted_text(table, terminal_width(), keep=len(table.columns))
    large = proposed["too_large"]
    below = [f"does not fit: {', '.join(large)}"] if large else []
    below += [proposed[key] for key in ("command", "note") if key in proposed]
    return [shown, *(f"  {line}" for line in below)]


def engine_fits(params: Params, shape: ModelShape, gpu: float, gpus: int, episodes: int) -> bool:
    """Whether an engine's training fits with so many episodes at once on each GPU."""
    return sum(memory.engine_need(params, shape, gpus, episodes)) <= USABLE * gpu


def on_all_gpus(params: Params, shape: ModelShape, cluster: Cluster) -> dict[str, Any]:
    """What an engine needs on this cluster: the episodes of an optimizer step are a multiple of the
    GPUs, and those of a rollout a multiple of the former.
    """
    ppo, gpus = params.ppo, cluster.all_gpus
    step = gpus * math.ceil(ppo.mini_batch_size / gpus)
    micro = ppo.micro_batch_size
    while micro > 1 and (
        step % (micro * gpus) or not engine_fits(params, shape, cluster.bytes, gpus, micro)
    ):
        micro //= 2
    changes: dict[str, Any] = {
        "launcher.ray_address": params.launcher.ray_address,
        "launcher.nodes": cluster.nodes,
        "launcher.gpus_per_node": cluster.gpus,
        "ppo.batch_size": step * max(round(ppo.batch_size / step), 1),
        "ppo.mini_batch_size": step,
        "ppo.micro_batch_size": micro,
    }
    if ppo.engine is Engine.openrlhf:
        sizes = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0]
        room = VLLM_WEIGHTS * cluster.bytes
        enough = [size for size in sizes if 2 * shape.weights / size <= room]
        size = min(enough, default=cluster.gpus)
        changes["ppo.engine_options"] = ppo.engine_options | {"vllm.tensor_parallel_size": size}
    return changes


def with_adapters(params: Params, given: Mapping[str, str]) -> dict[str, Any]:
    """What Rondo's own PPO needs; lengths and batches stay, and learning rates that are given."""
    default = PpoParams()
    changes: dict[str, Any] = {"ppo.micro_batch_size": 1, "ppo.gradient_checkpointing": True}
    if params.ppo.engine is not Engine.local:
        changes |= {"ppo.engine": Engine.local.value, "ppo.engine_options": {}}
    if not params.ppo.lora.r:
        rates = {f"ppo.{name}": getattr(default, name) for name in RATES}
        changes |= {key: rate for key, rate in rates.items() if key not in given}
        changes |= {"ppo.lora.r": default.lora.r, "ppo.critic_lora.r": default.critic_lora.r}
    return changes
