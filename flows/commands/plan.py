"""`rondo plan`: which GPUs PPO needs for a model, by which engine, and with which settings."""

import argparse

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.config import KEEP, resolve
from flows.core.tables import render_text
from flows.execution import cluster_plan, estimate
from flows.execution.cluster_plan import Cluster, Plan, Workload
from flows.execution.machine import Machine
from flows.execution.memory import Limits
from flows.execution.model_shape import NAMED_SIZES, ModelShape, read_shape
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params

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
    local = local_bytes(params, shape, cluster)
    return about + recommendation(plan, local, shape)


def _table(plan: Plan) -> Table:
    columns = ("weights", "gathered", "activations", "logits", "cache")
    table = Table("phase", *columns, "all", box=SIMPLE_HEAD)
    for phase, parts in plan.phases.items():
        sizes = [parts.get(name, 0.0) for name in columns] + [sum(parts.values())]
        table.add_row(phase, *(f"{size / 1e9:.1f}" if size else "-" for size in sizes))
    return table


def local_bytes(params: Params, shape: ModelShape, cluster: Cluster) -> dict[str, float]:
    """Bytes by stage if Rondo itself trains adapters on one GPU of this kind."""
    from stages.lib.lm.generation import GPU_CACHE_SHARE
    from stages.lib.lm.logprobs import GPU_PIECE
    from stages.lib.lm.packing import GPU_BATCH_TOKENS

    size = cluster.gpu_bytes
    limits = Limits(GPU_PIECE, GPU_CACHE_SHARE * size, GPU_BATCH_TOKENS)
    machine = Machine("cuda", {}, "bfloat16", size, size, "sdpa", limits)
    adapters = {"lora": {"r": 16}, "critic_lora": {"r": 16}, "engine": "local"}
    more = {"micro_batch_size": 1, "engine_options": {}}
    ppo = params.ppo.model_copy(
        update=type(params.ppo).model_validate(params.ppo.model_dump() | adapters | more).__dict__
    )
    return estimate.stage_memory(params.model_copy(update={"ppo": ppo}), machine, shape)


def recommendation(plan: Plan, local: dict[str, float], shape: ModelShape) -> list[str]:
    """Which engine, and the options of `rondo run`."""
    cluster, work = plan.cluster, plan.work
    largest = max(local, key=lambda stage: local[stage])
    need = f"{local[largest] / 1e9:.0f} GB for {largest}"
    if local[largest] <= cluster.usable:
        advice = [
            f"recommended: Rondo's own PPO with adapters on one GPU (at most {need})",
            "  rondo run --set ppo.micro_batch_size=1 --set ppo.gradient_checkpointing=true",
        ]
    else:
        advice = [f"Rondo's own PPO with adapters does not fit on one GPU: {need}"]
    if not plan.fits:
        fewest = cluster_plan.smallest_that_fits(shape, cluster, work)
        answer = "no number of them suffices: lower ppo.micro_batch_size or the lengths"
        if fewest:
            answer = f"it takes {fewest.cluster.nodes} x {fewest.cluster.gpus_per_node} of them"
        return [*advice, f"OpenRLHF with all weights does not fit on these GPUs; {answer}"]
    options = f"{{vllm.tensor_parallel_size: {plan.tensor_parallel}}}"
    return [
        *advice,
        "OpenRLHF with all weights fits:",
        f"  rondo run --preset openrlhf --set launcher.ray_address=http://HEAD:8265 --set "
        f"launcher.nodes={cluster.nodes} --set launcher.gpus_per_node={cluster.gpus_per_node} "
        f"--set ppo.batch_size={work.batch} --set ppo.mini_batch_size={work.mini_batch} "
        f"--set ppo.micro_batch_size={work.micro_batch} --set 'ppo.engine_options={options}'",
    ]
