"""Setup of TRL's trainers: initial checkpoint, arguments, and metrics."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from stages.lib.core.files import is_placeholder
from stages.lib.core.heap import trim_heap
from stages.lib.core.launch import hide_processes
from stages.lib.core.params.shared import InitFrom, ModelParams, TrainParams
from stages.lib.core.progress import Pass, progress
from stages.lib.core.recorder import MetricLogger
from stages.lib.lm.loading import resolve_dtype
from stages.lib.lm.packing import padding_free, unwrap_peft
from stages.lib.training.sharing import SharedTraining

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
    hide_processes()  # from Accelerate: sharing.py shares the work
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


class NoEmbeddingGradients(TrainerCallback):
    """Ends the backward pass at the lowest adapter.

    With gradient checkpointing, TRL and transformers let gradients reach the embeddings, which only
    reentrant checkpoints need.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        unwrap_peft(kwargs["model"]).disable_input_require_grads()


class BatchCounter(TrainerCallback):
    """Counts the batches of a training, so that a long step shows how far it is."""

    def __init__(self, training: Pass) -> None:
        self.training = training

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.total = state.max_steps * args.gradient_accumulation_steps

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.add()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training.add()


class HeapTrimmer(TrainerCallback):
    """Trims the heap now and then: trimmed at each step, SFT takes a tenth longer."""

    STEPS = 10

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
    trainer.add_callback(NoEmbeddingGradients)
    with padding_free(trainer.model), progress("training", unit="batches") as training:
        trainer.add_callback(BatchCounter(training))
        trainer.add_callback(HeapTrimmer)
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
