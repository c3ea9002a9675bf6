"""TRL's SFT on tokens: the loss is that of the responses alone."""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stages.lib.core.types import TokenIds
from stages.lib.lm.logprobs import selective_log_softmax
from stages.lib.lm.packing import padding_free, unwrap_peft

Pairs = tuple[list[TokenIds], list[TokenIds]]  # prompts, and a response to each


def train_on_completions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: Pairs,
    arguments: dict[str, Any],
    callback: TrainerCallback,
) -> Any:
    """Train a model (with adapters or whole) on the responses' tokens; `arguments`: those of
    SFTConfig. Returns the model.
    """
    rows = [
        {"input_ids": p + c, "completion_mask": [0] * len(p) + [1] * len(c)}
        for p, c in zip(*train, strict=True)
    ]
    trainer = (SFTTrainer if torch.cuda.is_available() else ResponseTrainer)(
        model=model,
        args=SFTConfig(**arguments, completion_only_loss=True, packing=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    with padding_free(model):
        trainer.train()
    return trainer.model.eval()


class ResponseTrainer(SFTTrainer):
    """TRL's loss (per-token NLL of the responses), with the vocabulary's head at their tokens
    alone.

    TRL does so where Triton runs; elsewhere it multiplies and normalises prompts and padding too.
    For heads that do not scale their logits (those of Gemma 2, Cohere and Granite do).
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        inner, labels = unwrap_peft(model), inputs["labels"][:, 1:]
        learnt = labels != -100
        with self.accelerator.autocast():
            states = inner.base_model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                use_cache=False,
            )
            logits = inner.get_output_embeddings()(states.last_hidden_state[:, :-1][learnt])
        tokens = learnt.sum() if num_items_in_batch is None else num_items_in_batch
        return -selective_log_softmax(logits, labels[learnt]).sum() / tokens
