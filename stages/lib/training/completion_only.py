"""TRL's SFT on tokens, with the loss of the responses only."""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stages.lib.core.progress import progress
from stages.lib.core.types import TokenIds
from stages.lib.lm.logprobs import logprobs_from_states
from stages.lib.lm.packing import unwrap_peft
from stages.lib.training.sharing import SharedTraining
from stages.lib.training.trl_setup import run_trainer

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
    Not for models that change logits after the head, which `load_causal_lm` refuses.
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
