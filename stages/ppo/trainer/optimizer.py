"""AdamW for the trained weights of one model, with float32 master weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.types import StateDict
from stages.lib.lm.saving import trainable_named


class MasterWeightOptimizer:
    """AdamW on the trained weights of `model`; bfloat16 weights are copies of float32 masters.

    In bfloat16 an update of 3e-6 would be rounded away; in a float32 master it adds up.

    Args:
        model: its parameters that require gradients are trained.
        learning_rate: the peak rate.
        rate: the factor on `learning_rate`, by the number of the update (from 0).
    """

    def __init__(self, model: Any, learning_rate: float, rate: Callable[[int], float]) -> None:
        self.weights = dict(trainable_named(model))
        self.masters = {name: self._master(weight) for name, weight in self.weights.items()}
        # eps 1e-5, as in PPO's reference implementations (arXiv 2403.17031), not torch's 1e-8
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=learning_rate, eps=1e-5, weight_decay=0.0, fused=True
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
