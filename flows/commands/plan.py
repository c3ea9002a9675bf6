"""`rondo plan`: which GPUs PPO needs for a model, by which engine, and with which settings."""

import argparse

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.config import KEEP, overlay, resolve
from flows.core.tables import render_text
from flows.execution import cluster_plan, estimate
from flows.execution.cluster_plan import Cluster, Plan, Workload
from flows.execution.machine import Machine
from flows.execution.memory import Limits
from flows.execution.model_shape import NAMED_SIZES, ModelShape, read_shape
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params

# Rondo's own PPO, with the lengths and numbers of the other settings
ADAPTERS = {
    "engine": "local",
    "engine_options": {},
    "lora": {"r": 16},
    "critic_lora": {"r": 16},
    "micro_batch_size": 1,
}
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
    address = [] if options.preset == KEEP else ["launcher.ray_address=http://127.0.0.1:8265"]
    params = resolve(options.preset, None, [*address, *options.set])
    shape = NAMED_SIZES.get(options.model.lower()) or read_shape(options.model)
    if shape is None:
        raise BadInput(
            f"--model {options.model}: no folder, no size ({', '.join(NAMED_SIZES)}), and its "
            "config.json is neither in the cache nor can the hub be reached"
        )
    print("\n".join(lines(params, shape, cluster, options.model)))
    return 0


def lines(params: Params, shape: ModelShape, cluster: Cluster, model: str) -> list[str]:
    """The answer: sizes, memory in each phase, time, and the recommended engine."""
    ppo = params.ppo
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
    about = [
        f"{model}: {shape.weights / 1e9:.2f}e9 weights; {cluster.nodes} node(s) with "
        f"{cluster.gpus_per_node} GPUs of {cluster.gpu_bytes / 1e9:.0f} GB",
        f"{work.episodes} episodes of {work.prompt} + {work.response} tokens at most, "
        f"{plan.work.micro_batch} per GPU at once",
        "estimates, never measured by Rondo (docs/scale.md)",
        "",
        "PPO by OpenRLHF, all weights, all models on all GPUs by turns; GB of one GPU:",
        render_text(_table(plan)),
        f"RAM per node, where policy and critic wait: {plan.ram / 1e9:.0f} GB",
        f"one vLLM engine has {plan.tensor_parallel} GPU(s) and holds {plan.sequences} responses",
        f"training: {plan.hours / factor:.1f} to {plan.hours * factor:.1f} hours on A800, in "
        "proportion to published runs",
        "",
    ]
    return about + recommendation(plan, params, shape)


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


def recommendation(plan: Plan, params: Params, shape: ModelShape) -> list[str]:
    """Which engine, the options of `rondo run`, and which of Rondo's stages do not fit."""
    cluster, work = plan.cluster, plan.work
    adapters = check_params(overlay(params.model_dump(mode="json"), {"ppo": ADAPTERS}), "plan")
    local = stage_bytes(adapters, shape, cluster)
    settings = f"ppo.micro_batch_size={ADAPTERS['micro_batch_size']}"
    advice = [
        f"Rondo's own PPO with adapters, each stage on one GPU; GB: {_listed(local)}",
        too_large(local, cluster)
        or f"  recommended: rondo run --set {settings} --set ppo.gradient_checkpointing=true",
    ]
    if not plan.fits:
        fewest = cluster_plan.smallest_that_fits(shape, cluster, work)
        answer = "no number of them suffices: lower ppo.micro_batch_size or the lengths"
        if fewest:
            answer = f"it takes {fewest.cluster.nodes} x {fewest.cluster.gpus_per_node} of them"
        return [*advice, f"OpenRLHF with all weights does not fit on these GPUs; {answer}"]
    others = stage_bytes(params, shape, cluster)
    options = f"{{vllm.tensor_parallel_size: {plan.tensor_parallel}}}"
    return [
        *advice,
        "OpenRLHF with all weights fits:",
        f"  rondo run --preset openrlhf --set launcher.ray_address=http://HEAD:8265 --set "
        f"launcher.nodes={cluster.nodes} --set launcher.gpus_per_node={cluster.gpus_per_node} "
        f"--set ppo.batch_size={work.batch} --set ppo.mini_batch_size={work.mini_batch} "
        f"--set ppo.micro_batch_size={work.micro_batch} --set 'ppo.engine_options={options}'",
        f"Rondo's stages beside it, each on one GPU (ppo: validation); GB: {_listed(others)}",
        *filter(None, [too_large(others, cluster)]),
    ]


def too_large(sizes: dict[str, float], cluster: Cluster) -> str:
    """Which stages do not fit on one GPU; "" if all do."""
    names = [stage for stage, size in sizes.items() if size > cluster.usable]
    return f"  does not fit: {', '.join(names)}" if names else ""


def _listed(sizes: dict[str, float]) -> str:
    return ", ".join(f"{stage} {size / 1e9:.0f}" for stage, size in sizes.items())
