"""TRL's trainers: initial checkpoint, arguments and metrics; SFT on tokens, with the loss of the
responses only; and one training by several processes (stages/lib/lm/world.py).

Each process runs the whole training, on its own rows of every batch. Before each optimizer step,
the gradients are added up. So the batches, their order and the loss are those of one process, which
Accelerate's own data parallelism changes: it groups other rows by length, and fills up the last
batch of an epoch.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stages.lib.core.files import is_placeholder
from stages.lib.core.launch import hide_processes
from stages.lib.core.params.shared import InitFrom, ModelParams, TrainParams
from stages.lib.core.progress import Pass, progress
from stages.lib.core.ram import trim_heap
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import TokenIds
from stages.lib.lm import world
from stages.lib.lm.loading import resolve_dtype
from stages.lib.lm.logprobs import logprobs_from_states
from stages.lib.lm.packing import padding_free, unwrap_peft
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


# Logits that TRL computes at once on a CPU: tokens x entries of the vocabulary, 4 MiB in float32,
# which fit into the processor's cache. Its 4,096 x 32,768 are for Triton; without Triton some eight
# float32 copies of them exist (docs/performance.md).
CPU_TILE_TOKENS, CPU_TILE_VOCABULARY = 256, 4096


def initial_checkpoint(train: TrainParams, previous: Path, base: Path) -> tuple[Path, bool]:
    """Choose the checkpoint that training starts from.

    Args:
        train: section `sft` or `reward` of params.yaml.
        previous: model folder of the round before, or a placeholder in the first round.
        base: folder of the base model.

    Returns:
        The folder, and whether training continues the round before.
    """
    continues = train.init_from is InitFrom.previous and not is_placeholder(previous)
    return (previous if continues else base), continues


def trainer_arguments(
    train: TrainParams, model: ModelParams, seed: int, work: Path, continues: bool
) -> dict[str, Any]:
    """Keyword arguments for TRL's SFTConfig, RewardConfig and others.

    Args:
        train: the learning rate, sizes and lengths.
        model: section `model` of params.yaml, for the dtype.
        seed: seed of the training.
        work: folder for the trainer's own files.
        continues: whether training continues the round before (see `continue_epochs`).
    """
    bf16, cuda = resolve_dtype(model.dtype) is torch.bfloat16, torch.cuda.is_available()
    epochs = train.num_train_epochs
    if continues and train.continue_epochs:
        epochs = train.continue_epochs
    hide_processes()  # from Accelerate: SharedTraining shares the work
    # On a CPU `bf16=True` is refused or ignored; Accelerate reads this variable on every device.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if bf16 else "no"
    return {
        "output_dir": str(work / "trainer"),
        "seed": seed,
        "learning_rate": train.learning_rate,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "num_train_epochs": epochs,
        "max_steps": train.max_steps or -1,
        "warmup_steps": train.warmup_ratio,
        "max_length": train.max_length,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "group_by_length",
        "bf16": bf16 and cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": train.gradient_checkpointing,
        "dataloader_pin_memory": cuda,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


class TrainingHooks(TrainerCallback):
    """Counts the batches of a training, so that a long step shows how far it is; and trims the heap
    every STEPS steps: trimmed at each step, SFT takes a tenth longer.
    """

    STEPS = 10

    def __init__(self, training: Pass) -> None:
        self.training = training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # End the backward pass at the lowest adapter: with gradient checkpointing, TRL and
        # transformers let gradients reach the embeddings, which only reentrant checkpoints need.
        unwrap_peft(kwargs["model"]).disable_input_require_grads()
        self.training.total = state.max_steps * args.gradient_accumulation_steps

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.add()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.add()
        if state.global_step % self.STEPS == 0:
            trim_heap()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trim_heap()


def run_trainer(
    trainer: SharedTraining,
    checkpoint: Path | None = None,
) -> Any:
    """Train with one of TRL's trainers, without its printed metrics and without padding.

    Args:
        trainer: the trainer.
        checkpoint: one of its own, from which the training resumes.

    Returns:
        The trained model in eval mode.
    """
    if not torch.cuda.is_available():
        chunked_logprob.TOKEN_CHUNK_SIZE = CPU_TILE_TOKENS
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = CPU_TILE_VOCABULARY
        # TRL leaves out prompts and padding only where Triton runs, as it has compilers in mind
        # for which the number of tokens must not vary
        trl_utils._use_triton = lambda _: True
    trainer.remove_callback(PrinterCallback)
    unwrap_peft(trainer.model).disable_input_require_grads()  # TRL's hook, before transformers' own
    with padding_free(trainer.model), progress("training", unit="batches") as training:
        trainer.add_callback(TrainingHooks(training))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.check_weights()
    return trainer.model.eval()


class MetricLoggerCallback(TrainerCallback):
    """Passes the metrics of each step to the stage's MetricLogger.

    Args:
        recorder: the stage's metrics.
        names: TRL's name of each metric to log -> its name in metrics.jsonl.
        show: names of the metrics in the progress line.
    """

    def __init__(self, recorder: MetricLogger, names: dict[str, str], show: list[str]) -> None:
        self.recorder, self.names, self.show = recorder, names, show
        self.before = len(recorder.steps)  # steps of the ensemble's members trained before

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.recorder.total_steps = self.before + state.max_steps

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        metrics = {
            name: float(logs[trl_name])
            for trl_name, name in self.names.items()
            if logs and trl_name in logs
        }
        if "loss" in metrics:
            self.recorder.log(self.before + state.global_step, metrics, self.show)


TokenizedDemonstrations = tuple[
    list[TokenIds], list[TokenIds]
]  # (prompts, one response per prompt)


def train_on_completions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: TokenizedDemonstrations,
    arguments: dict[str, Any],
    callback: TrainerCallback,
) -> Any:
    """Train with a trainer of `completion_trainer`; returns the trained model in eval mode."""
    return run_trainer(completion_trainer(model, tokenizer, train, arguments, callback))


def completion_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: TokenizedDemonstrations,
    arguments: dict[str, Any],
    callback: TrainerCallback,
) -> SharedTraining:
    """TRL's trainer of a model (its adapters, or all weights) on the tokens of responses.

    Args:
        model: a causal language model or a PeftModel.
        tokenizer: its tokenizer.
        train: tokens of prompts and responses.
        arguments: arguments of TRL's SFTConfig.
        callback: receives the metrics of each step.
    """
    rows = [
        {"input_ids": p + c, "completion_mask": [0] * len(p) + [1] * len(c)}
        for p, c in zip(*train, strict=True)
    ]
    with progress("preparing the training"):
        return (SharedSFTTrainer if torch.cuda.is_available() else SharedResponseTrainer)(
            model=model,
            args=SFTConfig(**arguments, completion_only_loss=True, packing=False),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[callback],
        )


class ResponseTrainer(SFTTrainer):
    """TRL's loss (NLL per response token), with logits for response tokens only.

    TRL itself does this only with Triton; otherwise it computes logits of prompts and padding, too.
    The logits never exist as a whole, as with TRL's own loss.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        inner, labels = unwrap_peft(model), inputs["labels"][:, 1:]
        is_response = labels != -100
        with self.accelerator.autocast():
            states = inner.base_model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                use_cache=False,
            )
            response_states = states.last_hidden_state[:, :-1][is_response]
            logprobs = logprobs_from_states(inner, response_states, labels[is_response])
        tokens = is_response.sum() if num_items_in_batch is None else num_items_in_batch
        return -logprobs.sum() / tokens


class SharedSFTTrainer(SharedTraining, SFTTrainer):
    pass


class SharedResponseTrainer(SharedTraining, ResponseTrainer):
    pass
