"""What holds for every stage that trains: settings that change memory and time, not results; and no
tensor ever has the logits of all tokens of a batch.
"""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.lm import generation, logprobs
from stages.lib.training import trl_setup
from tests.paths import ROOT

TRAINING = ["sft", "reward", "ppo", "dpo", "rloo", "grpo", "best_of_n"]
SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "max_steps": 1,
    "num_ppo_epochs": 1,
    "on_danger": "warn",
    "validation_prompts": 1,
}


PIECE = 3  # rows of logits that one tensor may have


class Recorder(TorchDispatchMode):
    """Records the rows of the largest tensor with the vocabulary as a dimension, forward and
    backward, while it is the current mode.
    """

    def __init__(self) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained("assets/model")
        self.vocabulary, self.hidden, self.rows = config.vocab_size, config.hidden_size, 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            # (V, H) are embeddings, heads and their gradients
            if self.vocabulary in shape and self.hidden not in shape:
                self.rows = max(self.rows, value.numel() // self.vocabulary)
        return result


@pytest.fixture
def train(make_round, monkeypatch):
    """A function that trains one step, with or without gradient checkpointing, and returns how
    often a layer ran in training, how often gradients passed through its input, and the rows of the
    largest tensor of logits. The sizes of pieces are those of a CPU.
    """
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    vocabulary = AutoConfig.from_pretrained("assets/model").vocab_size
    monkeypatch.setattr(logprobs, "CPU_PIECE", PIECE * vocabulary)
    monkeypatch.setattr(trl_setup, "CPU_TILE_TOKENS", PIECE)
    monkeypatch.setattr(generation, "CPU_CACHE_BYTES", 1)  # samples one row at a time
    calls: list[tuple[bool, bool]] = []
    forward = LlamaAttention.forward

    def counted(self, hidden_states, *args, **kwargs):
        calls.append((torch.is_grad_enabled(), hidden_states.requires_grad))
        return forward(self, hidden_states, *args, **kwargs)

    def run(name: str, gradient_checkpointing: bool) -> tuple[int, int, int]:
        changed = with_settings(params, name, gradient_checkpointing)
        Path("params.yaml").write_text(yaml.safe_dump(changed.model_dump(mode="json")))
        stage = name if name in ("sft", "reward") else "ppo"
        if stage == "ppo":
            shutil.rmtree("rounds/r0/ppo", ignore_errors=True)
        shutil.rmtree(".rondo", ignore_errors=True)
        with monkeypatch.context() as patch, Recorder() as recorder:
            patch.setattr(LlamaAttention, "forward", counted)
            calls.clear()
            importlib.import_module(f"stages.{stage}.__main__").main(changed, "r0")
        layers, gradients = (sum(column) for column in zip(*calls, strict=True))
        return layers, gradients, recorder.rows

    return run


def with_settings(params: Params, name: str, gradient_checkpointing: bool) -> Params:
    values = params.model_dump()
    algorithm = "ppo" if name in ("sft", "reward") else name
    values["algorithm"] = algorithm
    values["ppo"] |= SHORT | {"entropy_coef": 0.1}  # entropies have a gradient too
    values["ppo"]["critic_warmup_epochs"] = 0
    values["best_of_n"]["n"] = 2
    for section in ("sft", "reward"):
        values[section] |= {"max_steps": 1, "per_device_train_batch_size": 4}
    section = name if name in ("sft", "reward") else "ppo"
    values[section]["gradient_checkpointing"] = gradient_checkpointing
    return check_params(values, "test")


@pytest.mark.parametrize("name", TRAINING)
def test_gradient_checkpointing_computes_layers_twice_and_logits_exist_only_in_pieces(train, name):
    """And gradients do not pass below the lowest adapter, where TRL would let them."""
    layers, gradients, rows = train(name, False)
    checkpointed_layers, checkpointed_gradients, checkpointed_rows = train(name, True)
    assert gradients > 0
    assert checkpointed_layers == 2 * layers
    assert checkpointed_gradients == 2 * gradients
    assert rows == checkpointed_rows == (0 if name == "reward" else PIECE)


@pytest.mark.parametrize(("section", "files"), [("sft", "sft"), ("reward", "pairs")])
def test_texts_that_do_not_fit_are_left_out_and_counted(make_round, monkeypatch, section, files):
    """One more text in the training and in the held-out set, each longer than max_length."""
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = Path("rounds/r0/prepare/data")
    for part, copies in (("train", 2), ("eval", 1)):
        path = folder / f"{files}_{part}.jsonl"
        rows = read_jsonl(path, "")
        long = rows[0] | {"completion": " was fine" * 40, "chosen": " was fine" * 40}
        write_jsonl(path, rows + [long | {"id": f"long-{n}"} for n in range(copies)])
    shutil.copy(folder / "pairs_train.jsonl", "rounds/r0/annotate/data")
    changed = with_settings(params, section, False)
    Path("params.yaml").write_text(yaml.safe_dump(changed.model_dump(mode="json")))
    importlib.import_module(f"stages.{section}.__main__").main(changed, "r0")
    metrics = json.loads(Path(f"rounds/r0/{section}/metrics.json").read_text())
    assert (metrics["overlong"], metrics["overlong_held_out"]) == (2, 1)


@pytest.mark.parametrize("section", ["sft", "reward"])
def test_lengths_that_do_not_fit_together_end_the_stage_before_it_trains(make_round, section):
    params = make_round("r0", 1.0)
    changed = check_params(params.model_dump() | {section: {"max_length": 20}}, "test")
    with pytest.raises(BadInput, match=rf"{section}\.max_length is 20"):
        importlib.import_module(f"stages.{section}.__main__").main(changed, "r0")
