"""AdamW for the trained weights of one model, with float32 master weights; also of a model whose
layers are divided among the processes (stages/lib/lm/world.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.saving import trainable_named
from stages.lib.lm.world import gather_rows, is_sharded, local, own_rows


class MasterWeightOptimizer:
    """AdamW on the trained weights of `model`; bfloat16 weights are copies of float32 masters.

    In bfloat16 an update of 3e-6 would be rounded away; in a float32 master it adds up.

    Args:
        model: its parameters that require gradients are trained.
        learning_rate: the peak rate.
        rate: the factor on `learning_rate`, by the number of the update (from 0).
        eps: AdamW's.
    """

    def __init__(
        self, model: Any, learning_rate: float, rate: Callable[[int], float], eps: float
    ) -> None:
        self.weights = dict(trainable_named(model))
        self.masters = {name: self._master(weight) for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=learning_rate, eps=eps, weight_decay=0.0, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def _master(self, weight: Tensor) -> Tensor:
        return weight.detach().float() if weight.dtype is torch.bfloat16 else weight

    def accumulate_grads(self) -> None:
        """Add the gradients of a micro-batch to those of the masters.

        The sum is float32 too: in bfloat16 a small gradient would be rounded away.
        """
        for name, weight in self.weights.items():
            if (master := self.masters[name]) is not weight and weight.grad is not None:
                master.grad = (
                    weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                )
                weight.grad = None

    def grads(self) -> list[Tensor]:
        """The gradients, in the order of the weights; 0 where a backward pass has left none."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm`; returns their norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm)

    def step(self) -> None:
        """Update the weights and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, weight in self.weights.items():
            if (master := self.masters[name]) is not weight:
                weight.copy_(master)

    def state(self) -> StateDict:
        """Weights, optimizer and scheduler, for `load_state`."""
        masters = {name: master.detach() for name, master in self.masters.items()}
        return {
            "weights": masters,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    @torch.no_grad()
    def load_state(self, state: StateDict) -> None:
        for name, master in self.masters.items():
            master.copy_(state["weights"][name])
        self._copy_masters()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class ShardedOptimizer(MasterWeightOptimizer):
    """Each process updates its rows of every weight, and has masters and AdamW's state for these
    alone; also of weights that are whole in every process, whose new rows it then gathers.

    A state is that of the whole model, so that any number of processes can go on from it, sharded
    or not. All processes must call all methods.

    Attributes:
        sums: float32 gradients so far, by name: the own rows of a divided weight, else the whole.
    """

    def __init__(
        self, model: Any, learning_rate: float, rate: Callable[[int], float], eps: float
    ) -> None:
        super().__init__(model, learning_rate, rate, eps)
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


def make_optimizer(
    model: Any, learning_rate: float, rate: Callable[[int], float], eps: float
) -> MasterWeightOptimizer:
    """The optimizer that fits the model: divided among the processes, or whole in each."""
    kind = ShardedOptimizer if is_sharded(model) else MasterWeightOptimizer
    return kind(model, learning_rate, rate, eps)
