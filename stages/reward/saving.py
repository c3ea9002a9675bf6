"""Calibrates and saves the reward model, and checks that it scores the same after reloading."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.errors import RondoError
from stages.lib.core.files import write_json
from stages.lib.core.fresh_process import run_in_fresh_process
from stages.lib.core.params.shared import Reduce
from stages.lib.core.types import TokenIds
from stages.lib.lm.reward_ensemble import MEMBERS, attach_ensemble
from stages.lib.lm.saving import save_model

RELOAD_TOLERANCE = 1e-3


def set_calibration(model: Any, scores: Tensor) -> Any:
    """The model, which will be read in terms of these raw scores' mean and standard deviation."""
    model.config.mean, model.config.std = float(scores.mean()), float(scores.std())
    return model


def check_reloaded(model: Path, difference: float) -> None:
    """
    Raises:
        RondoError: the saved model is not the one that was trained.
    """
    if not difference <= RELOAD_TOLERANCE:
        raise RondoError(
            f"{model}: reloaded in a fresh process, scores differ by {difference:.4g} (at most {RELOAD_TOLERANCE}); do not use it"
        )


def save_ensemble(
    ensemble: list[Any], tokenizer: PreTrainedTokenizerBase, reduce: Reduce, folder: Path
) -> Any:
    """The first member in `folder`, the others in a folder within; returns the first, with the
    others.
    """
    first, *others = ensemble
    if others:
        first.config.ensemble_reduce = reduce.value
    save_model(first, tokenizer, folder)
    shutil.rmtree(folder / MEMBERS, ignore_errors=True)
    for number, member in enumerate(others, 1):
        save_model(member, tokenizer, folder / MEMBERS / str(number))
    return attach_ensemble(first, others)


def reload_difference(
    model: Path, sequences: list[TokenIds], expected: Tensor, work: Path
) -> float:
    """Largest difference between `expected` scores and those of the saved model in a process of its
    own.
    """
    write_json(work / "reload.json", sequences)
    scores = run_in_fresh_process(
        "stages.reward.rescore", model, work / "reload.json", failing=f"{model} cannot be reloaded"
    )
    return float((torch.tensor(scores) - expected).abs().max())
