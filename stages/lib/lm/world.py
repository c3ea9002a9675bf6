"""Several processes that share the work of one stage (`launcher.processes`), one per GPU.

Every process runs the whole stage, with the same inputs and the same random numbers. What takes
time is shared out (`share`, `batches_by_tokens`): sampling, scoring, forward and backward passes.
Its results are gathered, so that each process goes on with all of them and comes to the same
decisions. What must happen once, i.e. judges, reward servers and files, happens in the main
process. In a stage of one process, each function returns what it is given.

The decoder layers of a model may be divided among the processes (`launcher.shard`, FSDP2): each
process holds consecutive rows of every weight of every layer. A layer's forward and backward passes
are exchanges: they gather the whole layer and free it again, and add its gradients up. So all
processes must run the same number of passes, in the same order (`in_step`). Embeddings, the final
norm and the head stay whole in every process. Heads are called for each token that is sampled, for
each piece of a batch and again in the backward pass, as often as the process's own texts need; and
in many models embeddings and head are one weight.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from stages.lib.core.errors import RondoError
from stages.lib.core.launch import RUN_AGAIN, is_launched
from stages.lib.core.progress import progress
from stages.lib.core.ram import trim_heap
from stages.lib.lm.packing import find_layers

# Tokens per forward pass without gradients, padding included, on a CPU and on other devices.
# Another number can change the last bits of a product.
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1 << 12, 1 << 15
# A judge in the main process may take hours, and a process that ends is seen at once by the others.
TIMEOUT = timedelta(days=2)
GRACE_SECONDS = 5.0

Item = TypeVar("Item")
_alone = False  # in `in_main`: this process works while the others wait


def join() -> None:
    """Join the processes that were started together (stages/lib/core/launch.py), if there are any.
    Each one has one GPU by now, if the machine has any.
    """
    if is_launched() and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)


def size() -> int:
    """Number of processes that work together."""
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Number of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def is_main() -> bool:
    """Whether this process writes files and calls judges and servers."""
    return rank() == 0


def share(count: int) -> range:
    """This process's part of `count` items: consecutive ones, as many as others have, or one more
    or less.
    """
    return range(count * rank() // size(), count * (rank() + 1) // size())


@contextmanager
def _others() -> Iterator[None]:
    """An exchange with the other processes.

    Raises:
        RondoError: one of them has ended, or they do not reach each other.
    """
    try:
        yield
    except RuntimeError as error:
        # the agent, which has seen it end, and says how, ends this process meanwhile
        time.sleep(GRACE_SECONDS)
        raise RondoError(
            f"another process of this stage has ended, or cannot be reached ({error}). Next: read "
            f"its message, and {RUN_AGAIN}"
        ) from error


@contextmanager
def exchanges() -> Iterator[None]:
    """A block whose computations are exchanges with other processes: passes of sharded models.

    An error in it waits before it is shown. If it is that another process has ended, the agent ends
    this one meanwhile, as in the exchanges of this module.
    """
    try:
        yield
    except RuntimeError:
        if size() > 1:
            time.sleep(GRACE_SECONDS)
        raise


def wait() -> None:
    """Wait until all processes are here."""
    if size() > 1:
        with _others():
            dist.barrier()


def gather(items: Sequence[Item]) -> list[Item]:
    """The items of all processes, one process after the other. All of them must call it."""
    if size() == 1:
        return list(items)
    parts: list[Any] = [None] * size()
    with _others():
        dist.all_gather_object(parts, list(items))
    return list(chain(*parts))


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, which has the same bits in each.

    The tensors have one dtype and device. All processes must call it with the same shapes.
    """
    if size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])  # one message, not hundreds
    with _others():
        dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def any_of(flag: bool) -> bool:
    """Whether the flag of any process is true. All processes must call it."""
    if size() == 1:
        return flag
    number = torch.tensor(int(flag))
    with _others():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def in_main(function: Callable[[], Item]) -> Item:
    """The result of a function that the main process calls alone; if it raises, all raise."""
    global _alone
    if size() == 1:
        return function()
    value_and_error: list[Any] = [None, None]
    if is_main():
        _alone = True  # it may sample or score, which is not shared out then
        try:
            value_and_error[0] = function()
        except RondoError as error:
            value_and_error[1] = error
        except Exception as error:  # e.g. of a user's judge; it may be impossible to send
            value_and_error[1] = RondoError(f"{type(error).__name__}: {error}")
            value_and_error[1].__cause__ = error
        finally:
            _alone = False
    with _others():
        dist.broadcast_object_list(value_and_error)
    result, raised = value_and_error
    if raised:
        raise raised
    return cast(Item, result)


def check_equal(what: str, metrics: Mapping[str, Any]) -> None:
    """Check that all processes have the same numbers.

    Raises:
        RondoError: they do not, so they no longer train the same model. Names those that differ.
    """
    values = gather([[repr(value) for value in metrics.values()]])
    columns = dict(zip(metrics, zip(*values, strict=True), strict=True))
    differ = [
        f"{name} ({', '.join(reprs)})" for name, reprs in columns.items() if len({*reprs}) > 1
    ]
    if differ:
        raise RondoError(
            f"the {size()} processes of this stage differ in {what}: {'; '.join(differ)}. They no "
            "longer train the same model. Next: set launcher.processes to 1, and check that "
            "their GPUs and libraries are of one kind"
        )


@cache
def _mesh() -> DeviceMesh:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (size(),))


def shard(model: Any) -> None:
    """Divide the layers of a whole model, which every process has loaded alike; on a machine with
    GPUs, the process's part and the weights that stay whole move to its GPU.
    """
    mesh = _mesh()
    *_, layers = find_layers(model)
    for layer in layers:
        divided = fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=True,
            # gradients are added up in float32, and then have the dtype of the weights
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        # a loss is the process's share of the mini-batch's: gradients are sums, not means
        divided.set_gradient_divide_factor(1.0)
        divided.set_force_sum_reduction_for_comms(True)  # gloo has nothing else
    in_layers = {id(weight) for weight in layers.parameters()}
    trunk = model.base_model
    whole = {weight for weight in trunk.parameters() if id(weight) not in in_layers}
    fully_shard(trunk, mesh=mesh, ignored_params=whole)
    model.to(mesh.device_type)


def is_sharded(model: Any) -> bool:
    """Whether the model's layers are divided among the processes."""
    return isinstance(getattr(model, "base_model", None), FSDPModule)


@contextmanager
def whole_layers(model: Any) -> Iterator[None]:
    """Within this context, each process holds the whole model, and forward passes without
    gradients are no exchange. The weights must not change inside.
    """
    layers: Iterable[Any] = find_layers(model)[2] if is_sharded(model) else ()
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
            layer.reshard()


def in_step(model: Any, items: Iterable[Item], spare: Item) -> Iterator[tuple[Item, bool]]:
    """The items of this process, each with True. If the model is sharded, then `spare` with False,
    until every process has had all of its items.

    So each process runs as many passes as all others. The results for `spare` are to be dropped, or
    weighted by 0. All processes must call it if the model is sharded.
    """
    if not is_sharded(model):
        yield from ((item, True) for item in items)
        return
    own = iter(items)
    while True:
        item = next(own, None)
        if not any_of(item is not None):
            return
        yield (spare, False) if item is None else (item, True)
        trim_heap()  # layers that were gathered left pieces between what is kept


def own_rows(rows: int) -> slice:
    """The rows of a weight that this process holds, of `rows`: those of FSDP2."""
    per_process = -(-rows // size())
    return slice(*(min(per_process * rank, rows) for rank in (rank(), rank() + 1)))


def held_share(model: Any) -> float:
    """The share of the model's weights that this process holds, from 0 to 1."""
    weights = list(model.parameters())
    held = sum(local(weight).numel() for weight in weights)
    return held / sum(weight.numel() for weight in weights)


def local(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds, in the same memory: of a divided one its own
    rows, else all.
    """
    detached: Any = weight.detach()
    part: Tensor = detached.to_local() if isinstance(weight, DTensor) else detached
    return part


def gather_rows(part: Tensor, shape: torch.Size) -> Tensor:
    """The whole tensor of `shape`, from the `own_rows` of each process. All must call it."""
    stride = torch.empty(shape, device="meta").stride()
    divided = DTensor.from_local(
        part, _mesh(), [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return divided.full_tensor()


def gather_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights in the main process, from each process's part. All must call it if the model is
    sharded; the others get {} then.

    Args:
        model: of which the weights are, or were before they changed.
        weights: `local` ones, by name. Of a model that is not sharded they are whole already.
    """
    if not is_sharded(model):
        return dict(weights)
    shapes = _divided(model)
    whole = {}
    for name, part in weights.items():
        weight = gather_rows(local(part), shapes[name]) if name in shapes else part
        if is_main():
            whole[name] = weight.cpu() if name in shapes else weight
    return whole


def _divided(model: Any) -> dict[str, torch.Size]:
    weights = model.named_parameters()
    return {name: weight.shape for name, weight in weights if isinstance(weight, DTensor)}


def split_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of whole weights, by name, the parts that this process holds; copies, so that the whole ones
    can be freed.
    """
    if not is_sharded(model):
        return dict(weights)
    divided = _divided(model)
    return {
        name: weight[own_rows(len(weight))].clone() if name in divided else weight.clone()
        for name, weight in weights.items()
    }


def batches_by_tokens(
    lengths: Sequence[int], device: torch.device, what: str
) -> Iterator[list[int]]:
    """Indices of rows in batches for passes without gradients.

    Rows of a batch have similar lengths, so that attention pads little. A batch has at most
    CPU_BATCH_TOKENS or GPU_BATCH_TOKENS tokens with its padding, or one row. `what` names the pass
    in progress lines. Each of several processes gets a part of the batches, which are the same as
    those of one process: add the results up over the processes (world.py).
    """
    batches = list(_split_by_tokens(lengths, device))[rank() :: size()]
    with progress(what, sum(lengths[i] for batch in batches for i in batch), "tokens") as scoring:
        for batch in batches:
            yield batch
            scoring.add(sum(lengths[index] for index in batch))
    trim_heap()  # batches of different lengths left pieces of all sizes


def _split_by_tokens(lengths: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    limit = CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # rows come by length, so this one is the longest of its batch
        if batch and (len(batch) + 1) * lengths[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
