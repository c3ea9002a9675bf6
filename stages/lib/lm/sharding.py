"""Models whose decoder layers are divided among the processes of a stage (`launcher.shard`, FSDP2).

Each process holds a part of every weight of every layer: consecutive rows. A layer's forward and
backward passes are exchanges: they gather the whole layer and free it again, and add its gradients
up. So all processes must run the same number of passes, in the same order (`in_step`).

Embeddings, the final norm and the head stay whole in every process. Heads are called for each
token that is sampled, for each piece of a batch and again in the backward pass, as often as the
process's own texts need; and in many models embeddings and head are one weight.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from stages.lib.core.heap import trim_heap
from stages.lib.lm import world
from stages.lib.lm.shared_layers import find_layers

Item = TypeVar("Item")


@cache
def _mesh() -> DeviceMesh:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (world.size(),))


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
        if not world.any_of(item is not None):
            return
        yield (spare, False) if item is None else (item, True)
        trim_heap()  # layers that were gathered left pieces between what is kept


def own_rows(rows: int) -> slice:
    """The rows of a weight that this process holds, of `rows`: those of FSDP2."""
    per_process = -(-rows // world.size())
    return slice(*(min(per_process * rank, rows) for rank in (world.rank(), world.rank() + 1)))


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
        if world.is_main():
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
