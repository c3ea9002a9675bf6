"""The trained weights of a model, and what moves them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.types import StateDict
from stages.lib.lm.saving import trainable_named


class MasterWeightOptimizer:
    """AdamW on the trained weights of `model`, which follow float32 masters where they are
    bfloat16: a step of 3e-6 would be rounded away.

    rate: the share of `learning_rate` at an update.
    """

    def __init__(self, model: Any, learning_rate: float, rate: Callable[[int], float]) -> None:
        self.weights = dict(trainable_named(model))
        self.masters = {
            name: w.detach().float() if w.dtype is torch.bfloat16 else w
            for name, w in self.weights.items()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=learning_rate, eps=1e-5, weight_decay=0.0, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def accumulate_grads(self) -> None:
        """Add a micro-batch's gradients to the masters': in bfloat16 a small one would be rounded
        away too.
        """
        for name, weight in self.weights.items():
            if (master := self.masters[name]) is not weight and weight.grad is not None:
                master.grad = (
                    weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                )
                weight.grad = None

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the gradients before they are clipped to `max_norm`."""
        return torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for name, weight in self.weights.items():
            if (master := self.masters[name]) is not weight:
                weight.copy_(master)

    def state(self) -> StateDict:
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
        self._follow()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
