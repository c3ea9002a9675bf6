"""The loss of SFT, against TRL's own."""

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.core.params.training import SftParams
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.lora import add_adapters
from stages.lib.training import trl_setup
from stages.lib.training.trl_setup import ResponseTrainer, train_on_completions

ROWS = [
    {"input_ids": [5, 6, 7, 20, 21, 2], "completion_mask": [0, 0, 0, 1, 1, 1]},
    {"input_ids": [8, 22, 23, 2], "completion_mask": [0, 1, 1, 1]},
]


@pytest.mark.parametrize("items", [None, 12])
def test_loss_and_gradients_are_trls(tiny_folder, tmp_path, items):
    model = add_adapters(
        load_causal_lm(tiny_folder, ModelParams(dtype="float32")),
        LoraParams(r=4, top_layers=1),
        "CAUSAL_LM",
    )
    config = SFTConfig(
        str(tmp_path),
        completion_only_loss=True,
        use_cpu=True,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
    )
    results = []
    for kind in (ResponseTrainer, SFTTrainer):
        trainer = kind(
            copy.deepcopy(model),
            config,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=load_tokenizer(tiny_folder),
        )
        batch = trainer.data_collator(list(trainer.train_dataset))
        loss = trainer.compute_loss(
            trainer.model, batch, num_items_in_batch=items and torch.tensor(items)
        )
        loss.backward()
        results.append(
            [
                loss.detach(),
                *(weight.grad for weight in trainer.model.parameters() if weight.requires_grad),
            ]
        )
    for value, trl_value in zip(*results, strict=True):
        torch.testing.assert_close(value, trl_value)
    assert results[0][0] > 0 and any(bool(gradient.any()) for gradient in results[0][1:])


def test_the_heap_is_trimmed_every_ten_steps_and_after_training(
    tiny_folder, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(trl_setup, "trim_heap", lambda: trims.append(steps.state.global_step))
    train = SftParams(max_steps=21)
    arguments = trl_setup.trainer_arguments(train, ModelParams(), 0, tmp_path, continues=False)
    steps = ProgressOfTraining()
    model = load_causal_lm(tiny_folder, ModelParams(dtype="float32"))
    demonstrations = ([[5, 6, 7], [8]], [[20, 21, 2], [22, 23, 2]])
    train_on_completions(model, load_tokenizer(tiny_folder), demonstrations, arguments, steps)
    assert trims == [10, 20, 21]


class ProgressOfTraining(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.state = state
