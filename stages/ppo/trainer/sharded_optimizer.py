"""AdamW for a model whose layers are divided among the processes (stages/lib/lm/sharding.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.sharding import gather_rows, local, own_rows
from stages.ppo.trainer.optimizer import MasterWeightOptimizer


class ShardedOptimizer(MasterWeightOptimizer):
    """Each process updates its rows of every weight, and has masters and AdamW's state for these
    alone; also of weights that are whole in every process, whose new rows it then gathers.

    A state is that of the whole model, so that any number of processes can go on from it, sharded
    or not. All processes must call all methods.

    Attributes:
        sums: float32 gradients so far, by name: the own rows of a divided weight, else the whole.
    """

    def __init__(self, model: Any, learning_rate: float, rate: Callable[[int], float]) -> None:
        super().__init__(model, learning_rate, rate)
        self.sums: dict[str, Tensor] = {}

    def _master(self, weight: Tensor) -> Tensor:
        """The own rows: in float32 the weight's memory, else a copy."""
        return _rows(weight).float()

    def accumulate_grads(self) -> None:
        """As without sharding, but gradients of weights that are whole stay whole until they are
        added up over the processes; those of divided weights have been added up by their backward
        pass.
        """
        for name, weight in self.weights.items():
            if weight.grad is not None:
                grad, weight.grad = local(weight.grad), None
                if name in self.sums:
                    self.sums[name].add_(grad)
                else:
                    self.sums[name] = grad.float()

    def grads(self) -> list[Tensor]:
        """The gradients that are to be added up over the processes: those of whole weights."""
        return [
            self.sums.setdefault(name, torch.zeros_like(weight, dtype=torch.float32))
            for name, weight in self.weights.items()
            if not isinstance(weight, DTensor)
        ]

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm`; returns the norm of the whole gradient before."""
        for name, grad in self.sums.items():
            divided = isinstance(self.weights[name], DTensor)
            self.masters[name].grad = grad if divided else _rows(grad)
        self.sums = {}
        own_norm = torch.nn.utils.get_total_norm(
            [master.grad for master in self.masters.values() if master.grad is not None]
        )
        squared = own_norm.square()
        world.add_up([squared])
        norm = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm)
        return norm

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, weight in self.weights.items():
            master = self.masters[name].to(weight.dtype)
            if isinstance(weight, DTensor):
                local(weight).copy_(master)
            else:
                weight.copy_(gather_rows(master, weight.shape))

    def state(self) -> StateDict:
        """The state of the whole model, in the main process; in the others without tensors."""
        state, shapes = super().state(), [weight.shape for weight in self.weights.values()]
        optimizer = state["optimizer"]
        moments = {
            index: {name: _gathered(value, shapes[index]) for name, value in values.items()}
            for index, values in optimizer["state"].items()
        }
        masters = zip(state["weights"].items(), shapes, strict=True)
        return state | {
            "weights": {name: _gathered(master, shape) for (name, master), shape in masters},
            "optimizer": optimizer | {"state": moments},
        }

    def load_state(self, state: StateDict) -> None:
        """Take the own rows of a whole model's state."""
        optimizer = state["optimizer"]
        moments = {
            index: {name: _rows(value).clone() for name, value in values.items()}
            for index, values in optimizer["state"].items()
        }
        weights = {name: _rows(weight) for name, weight in state["weights"].items()}
        super().load_state(
            state | {"weights": weights, "optimizer": optimizer | {"state": moments}}
        )


def _rows(tensor: Tensor) -> Tensor:
    """This process's rows of a weight, in the same memory; all of a number."""
    if isinstance(tensor, DTensor):
        return local(tensor)
    return tensor.detach()[own_rows(len(tensor))] if tensor.dim() else tensor


def _gathered(part: Tensor, shape: torch.Size) -> Tensor | None:
    """The tensor of `shape` whose rows are divided, in the main process, else None; a number as it
    is.
    """
    whole = gather_rows(part, shape).cpu() if part.dim() else part
    return whole if world.is_main() else None
