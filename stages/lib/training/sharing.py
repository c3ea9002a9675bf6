"""TRL's trainers in several processes (stages/lib/lm/world.py).

Each process runs the whole training, on its own rows of every batch. Before each optimizer step,
the gradients are added up. So the batches, their order and the loss are those of one process, which
Accelerate's own data parallelism changes: it groups other rows by length, and fills up the last
batch of an epoch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer

from stages.lib.lm import world
from stages.lib.lm.saving import sum_of_trainable, trainable_named

ROWS = "own_and_all_rows"  # key in a batch: how many rows this process has, and the whole batch


class SharedTraining(Trainer):
    """Comes before a trainer of TRL's among the bases of a class.

    That one's loss is a mean over the rows of a batch; or if transformers tells it how many items
    all batches of a step have, a sum over items divided by their number.
    """

    own_rows: int  # of the current batch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.args.world_size == 1, "Accelerate would divide the batches again"
        self.collate_rows: Any = self.data_collator
        self.data_collator: Any = self.collate
        if world.size() > 1:
            accelerator: Accelerator = self.accelerator
            accelerator.gather = accelerator.gather_for_metrics = self.gather
            accelerator.reduce = self.add_up

    def collate(self, rows: Sequence[Any]) -> dict[str, Any]:
        """A batch of this process's rows."""
        own = world.share(len(rows))
        # a model cannot run on no rows: then one runs, and counts as none
        batch: dict[str, Any] = self.collate_rows([rows[i] for i in own] or rows[:1])
        return batch | {ROWS: (len(own), len(rows))}

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> Tensor | int | None:
        """Items of all processes in the batches of an optimizer step; None if nobody needs them."""
        own = [batch for batch in batch_samples if batch[ROWS][0]]
        count = super()._get_num_items_in_batch(own or batch_samples, device)
        if count is None:
            return None
        items = torch.as_tensor(count if own else 0, device=device)
        world.add_up([items])
        return items

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This process's part of the loss: the parts of all add up to the loss of the batch."""
        assert not return_outputs
        self.own_rows, all_rows = inputs.pop(ROWS)
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        is_mean = num_items_in_batch is None
        return loss * (self.own_rows / all_rows if is_mean else float(self.own_rows > 0))

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch; before an optimizer step, also the gradients of all processes."""
        loss = super().training_step(model, *args, **kwargs)
        world.add_up([loss])
        if self.accelerator.sync_gradients:
            add_up_gradients(model)
        return loss

    def check_weights(self) -> None:
        """
        Raises:
            RondoError: the processes have trained different weights.
        """
        if world.size() > 1:
            world.check_equal("the trained weights", {"their sum": sum_of_trainable(self.model)})

    def gather(self, tensor: Tensor) -> Tensor:
        """For metrics: the rows of all processes; or a number of each one, once for each of its
        rows, so that the mean of the result is the mean over all rows.
        """
        if tensor.dim():
            rows = tensor if self.own_rows else tensor[:0]
        else:
            rows = tensor.expand(self.own_rows)
        return torch.cat(world.gather([rows.detach().cpu()])).to(tensor.device)

    def add_up(self, tensor: Tensor, reduction: str) -> Tensor:
        """For metrics: the sum over all processes."""
        assert reduction == "sum"
        total = tensor.detach() * (self.own_rows > 0)
        world.add_up([total])
        return total


def add_up_gradients(model: Any) -> None:
    """Replace the gradients by their sums over all processes; 0 where a process has none."""
    if world.size() == 1:
        return
    weights = [weight for _, weight in trainable_named(model)]  # all float32
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    world.add_up([weight.grad for weight in weights if weight.grad is not None])
