"""`rondo plan`: which GPUs PPO needs for a model, by which engine, and with which settings."""

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.config import KEEP, read_preset, resolve
from flows.core.tables import render_text
from flows.execution import cluster_plan, estimate
from flows.execution.cluster_plan import Cluster, Plan, Workload
from flows.execution.machine import Machine
from flows.execution.memory import Limits
from flows.execution.model_shape import NAMED_SIZES, ModelShape, read_shape
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.engines import settings_to_change
from stages.lib.core.params.policy import Algorithm, Engine, PpoParams

RATES = ("learning_rate", "critic_learning_rate")
HEAD = "http://HEAD:8265"
ABOUT = "print which GPUs a model needs, memory by role, hours, the engine and its settings"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        required=True,
        help=f"a folder, a model of the hub, or a size: {', '.join(NAMED_SIZES)}",
    )
    command.add_argument(
        "--gpus", required=True, metavar="[NODESx]GPUSxGB", help="e.g. 8x80, or 2x8x80"
    )
    command.add_argument(
        "--preset",
        default="openrlhf",
        metavar="NAME",
        help="lengths, batches and episodes: of this preset (default: openrlhf), or `keep`: of "
        "params.yaml",
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one value of them"
    )


def run(options: argparse.Namespace) -> int:
    """
    Raises:
        BadInput: the model is not known, the GPUs are no numbers, or a setting is wrong.
    """
    cluster = cluster_plan.parse_cluster(options.gpus)
    address = [] if options.preset == KEEP else [f"launcher.ray_address={HEAD}"]
    params = resolve(options.preset, None, [*address, *options.set])
    shape = NAMED_SIZES.get(options.model.lower()) or read_shape(options.model)
    if shape is None:
        raise BadInput(
            f"--model {options.model}: no folder, no size ({', '.join(NAMED_SIZES)}), and its "
            "config.json is neither in the cache nor can the hub be reached"
        )
    request = Request(options.model, cluster, options.preset, options.set)
    print("\n".join(lines(params, shape, request)))
    return 0


@dataclass(frozen=True)
class Request:
    """What the user asks for. settings: the values of `--set`."""

    model: str
    cluster: Cluster
    preset: str
    settings: list[str]

    @property
    def values(self) -> dict[str, str]:
        """The settings, by key."""
        parts = (setting.partition("=") for setting in self.settings)
        return {key.strip(): value for key, _, value in parts}

    @property
    def names_model(self) -> bool:
        """Whether the model is one that `assets.model` can have."""
        return Path(self.model).is_dir() or "@" in self.model

    def command(self, changes: Mapping[str, Any]) -> tuple[str, Params]:
        """The command of a run with the user's settings and `changes`, and its params.

        Raises:
            BadInput: the settings do not fit each other.
        """
        values = self.values | {key: _yaml(value) for key, value in changes.items()}
        if self.names_model:
            values.setdefault("assets.model", self.model)
        settings = [f"{key}={value}" for key, value in values.items()]
        words = ["rondo", "run", "--preset", self.preset]
        words += [word for setting in settings for word in ("--set", setting)]
        return shlex.join(words), resolve(self.preset, None, settings)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def lines(params: Params, shape: ModelShape, request: Request) -> list[str]:
    """The answer: sizes, memory in each phase, time, and the recommended engine."""
    ppo, cluster = params.ppo, request.cluster
    work = Workload(
        params.prepare.max_prompt_tokens,
        ppo.response_length,
        ppo.batch_size,
        ppo.mini_batch_size,
        ppo.micro_batch_size,
        ppo.total_episodes,
    )
    plan = cluster_plan.make_plan(shape, cluster, work)
    factor = cluster_plan.GPU_SECONDS_FACTOR
    named = "" if request.names_model else "; add your model and data: --set assets.model=..."
    about = [
        f"{request.model}: {shape.weights / 1e9:.2f}e9 weights; {cluster.nodes} node(s) with "
        f"{cluster.gpus_per_node} GPUs of {cluster.gpu_bytes / 1e9:.0f} GB",
        f"{work.episodes} episodes of {work.prompt} + {work.response} tokens at most, "
        f"{plan.work.micro_batch} per GPU at once",
        f"estimates, never measured by Rondo (docs/scale.md){named}",
        "",
        "PPO by OpenRLHF, all weights, all models on all GPUs by turns; GB of one GPU:",
        render_text(_table(plan)),
        f"RAM per node, where policy and critic wait: {plan.ram / 1e9:.0f} GB",
        f"one vLLM engine has {plan.tensor_parallel} GPU(s) and holds {plan.sequences} responses",
        f"training: {plan.hours / factor:.1f} to {plan.hours * factor:.1f} hours on A800, in "
        "proportion to published runs",
        "",
    ]
    return about + recommendation(plan, params, shape, request)


def _table(plan: Plan) -> Table:
    columns = ("weights", "gathered", "activations", "logits", "cache")
    table = Table("phase", *columns, "all", box=SIMPLE_HEAD)
    for phase, parts in plan.phases.items():
        sizes = [parts.get(name, 0.0) for name in columns] + [sum(parts.values())]
        table.add_row(phase, *(f"{size / 1e9:.1f}" if size else "-" for size in sizes))
    return table


def stage_bytes(params: Params, shape: ModelShape, cluster: Cluster) -> dict[str, float]:
    """Bytes of Rondo's own stages, each of which has one GPU of this kind."""
    from flows.execution.matmul_speed import device_limits  # imports torch

    size = cluster.gpu_bytes
    limits = Limits(**device_limits("cuda", size))
    machine = Machine("cuda", {}, "bfloat16", size, size, "sdpa", limits)
    return estimate.stage_memory(params, machine, shape)


def recommendation(plan: Plan, params: Params, shape: ModelShape, request: Request) -> list[str]:
    """Which engine, the command, and which of Rondo's stages do not fit."""
    cluster = plan.cluster
    command, local_params = request.command(local_settings(params, request))
    local = stage_bytes(local_params, shape, cluster)
    advice = [
        f"Rondo's own PPO with adapters, each stage on one GPU; GB: {_listed(local)}",
        too_large(local, cluster) or f"  recommended: {command}",
    ]
    if not plan.fits:
        fewest = cluster_plan.smallest_that_fits(shape, cluster, plan.work)
        answer = "no number of them suffices: lower ppo.micro_batch_size or the lengths"
        if fewest:
            answer = f"it takes {fewest.cluster.nodes} x {fewest.cluster.gpus_per_node} of them"
        return [*advice, f"OpenRLHF with all weights does not fit on these GPUs; {answer}"]
    try:
        command, engine_params = request.command(engine_settings(plan, params, request))
    except BadInput as error:
        return [*advice, f"OpenRLHF with all weights fits, but not with these settings: {error}"]
    others = stage_bytes(engine_params, shape, cluster)
    return [
        *advice,
        "OpenRLHF with all weights fits:",
        f"  {command}",
        f"Rondo's stages beside it, each on one GPU (ppo: validation); GB: {_listed(others)}",
        *filter(None, [too_large(others, cluster)]),
    ]


def local_settings(params: Params, request: Request) -> dict[str, Any]:
    """What Rondo's own PPO with adapters needs; lengths and batches stay."""
    ppo, default = params.ppo, PpoParams()
    changes: dict[str, Any] = {"ppo.micro_batch_size": 1, "ppo.gradient_checkpointing": True}
    if ppo.engine is not Engine.local:
        changes |= {"ppo.engine": Engine.local.value, "ppo.engine_options": {}}
    if not ppo.lora.r:
        changes |= {"ppo.lora.r": default.lora.r, "ppo.critic_lora.r": default.critic_lora.r}
        changes |= _rates(default.model_dump(), request)
    return _algorithm(params) | changes


def engine_settings(plan: Plan, params: Params, request: Request) -> dict[str, Any]:
    """What OpenRLHF needs on this cluster."""
    ppo, cluster, work = params.ppo, plan.cluster, plan.work
    options = ppo.engine_options if ppo.engine is Engine.openrlhf else {}
    changes: dict[str, Any] = {
        "launcher.ray_address": params.launcher.ray_address or HEAD,
        "launcher.nodes": cluster.nodes,
        "launcher.gpus_per_node": cluster.gpus_per_node,
        "ppo.batch_size": work.batch,
        "ppo.mini_batch_size": work.mini_batch,
        "ppo.micro_batch_size": work.micro_batch,
        "ppo.engine_options": options | {"vllm.tensor_parallel_size": plan.tensor_parallel},
    }
    if ppo.engine is not Engine.openrlhf:
        changes |= {"ppo.engine": Engine.openrlhf.value, **settings_to_change("openrlhf", ppo)}
    if ppo.lora.r:
        changes |= _rates(read_preset(Engine.openrlhf.value)["ppo"], request)
    return _algorithm(params) | changes


def _algorithm(params: Params) -> dict[str, str]:
    return {} if params.algorithm is Algorithm.ppo else {"algorithm": Algorithm.ppo.value}


def _rates(ppo: Mapping[str, Any], request: Request) -> dict[str, float]:
    """The learning rates of a section, which adapters and all weights do not share, but for those
    that the user sets.
    """
    rates = {f"ppo.{name}": ppo[name] for name in RATES}
    return {key: rate for key, rate in rates.items() if key not in request.values}


def too_large(sizes: dict[str, float], cluster: Cluster) -> str:
    """Which stages do not fit on one GPU; "" if all do."""
    names = [stage for stage, size in sizes.items() if size > cluster.usable]
    return f"  does not fit: {', '.join(names)}" if names else ""


def _listed(sizes: dict[str, float]) -> str:
    return ", ".join(f"{stage} {size / 1e9:.0f}" for stage, size in sizes.items())
