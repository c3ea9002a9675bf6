"""No training stage ever has the logits of all tokens of a batch in one tensor.

The largest tensor with the vocabulary as a dimension is looked for in whole stages: training with
its backward pass, sampling, and scoring.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from stages.lib.core.params import check_params
from stages.lib.lm import generation, logprobs
from stages.lib.training import trl_setup
from tests.paths import ROOT
from tests.stages.test_training_settings import TRAINING, with_settings

PIECE = 3  # rows of logits that one tensor may have


class LogitsRecorder(TorchDispatchMode):
    """Records the rows of the largest tensor of logits, while it is the current mode."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.rows = vocabulary, hidden, 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            # (V, H) are embeddings, heads and their gradients
            if self.vocabulary in shape and self.hidden not in shape:
                self.rows = max(self.rows, value.numel() // self.vocabulary)
        return result


@pytest.fixture
def largest_logits(make_round, monkeypatch):
    """A function that runs a stage with one training step, and returns the rows of the largest
    tensor of logits. The sizes of pieces are those of a CPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = AutoConfig.from_pretrained("assets/model")
    monkeypatch.setattr(logprobs, "CPU_PIECE", PIECE * config.vocab_size)
    monkeypatch.setattr(trl_setup, "CPU_TILE_TOKENS", PIECE)
    monkeypatch.setattr(generation, "CPU_CACHE_BYTES", 1)  # samples one row at a time

    def run(name: str) -> int:
        values = with_settings(params, name, False).model_dump(mode="json")
        values["ppo"] |= {"entropy_coef": 0.1}  # entropies have a gradient too
        changed = check_params(values, "test")
        Path("params.yaml").write_text(yaml.safe_dump(changed.model_dump(mode="json")))
        stage = name if name in ("sft", "reward") else "ppo"
        with LogitsRecorder(config.vocab_size, config.hidden_size) as recorder:
            importlib.import_module(f"stages.{stage}.__main__").main(changed, "r0")
        return recorder.rows

    return run


@pytest.mark.parametrize("name", TRAINING)
def test_logits_exist_only_in_pieces(largest_logits, name):
    assert largest_logits(name) == (0 if name == "reward" else PIECE)
