"""Calibrate, save and reload reward models; a reloaded model must give the same scores."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.errors import RondoError
from stages.lib.core.files import write_json
from stages.lib.core.fresh_process import run_in_fresh_process
from stages.lib.core.params import load_params
from stages.lib.core.params.shared import Reduce
from stages.lib.core.types import TokenIds
from stages.lib.lm.loading import MEMBERS, attach_ensemble, load_reward_model, setup_torch
from stages.lib.lm.saving import save_model
from stages.lib.lm.scoring import calibrate_scores, ensemble_members, reward_scores

RELOAD_TOLERANCE = 1e-3


def check_reloaded(model: Path, difference: float) -> None:
    """Check that the saved model is the trained one. difference: of scores, the largest.

    Raises:
        RondoError: the scores differ by more than `RELOAD_TOLERANCE`, or are not finite.
    """
    # written so that nan fails
    if not difference <= RELOAD_TOLERANCE:
        raise RondoError(
            f"{model}: reloaded in a fresh process, scores differ by {difference:.4g}"
            f" (at most {RELOAD_TOLERANCE}); do not use it"
        )


def join_ensemble(members: list[Any], reduce: Reduce, demonstrations: list[TokenIds]) -> Any:
    """Join calibrated reward models into an ensemble, which is calibrated, too.

    Returns:
        The first member with the others attached, so that it scores as the whole ensemble.
    """
    first, *others = members
    if not others:
        return first
    first.config.ensemble_reduce = reduce.value
    first.config.ensemble_mean, first.config.ensemble_std = 0.0, 1.0
    model = attach_ensemble(first, others)
    scores = calibrate_scores(reward_scores(model, demonstrations), model)
    first.config.ensemble_mean, first.config.ensemble_std = (
        float(scores.mean()),
        float(scores.std()),
    )
    return model


def save_ensemble(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the first member in `folder` and the others in a folder within it."""
    first, *others = ensemble_members(model)
    save_model(first, tokenizer, folder)
    # a rerun with a smaller ensemble would otherwise keep old members
    shutil.rmtree(folder / MEMBERS, ignore_errors=True)
    for number, member in enumerate(others, 1):
        save_model(member, tokenizer, folder / MEMBERS / str(number))


def reload_difference(
    model: Path, sequences: list[TokenIds], expected: Tensor, work: Path
) -> float:
    """The largest difference between `expected` (B,) scores and those of the saved model,
    loaded in a fresh process.
    """
    write_json(work / "reload.json", sequences)
    scores = run_in_fresh_process(
        "stages.reward.saving", model, work / "reload.json", failing=f"{model} cannot be reloaded"
    )
    return float((torch.tensor(scores) - expected).abs().max())


def main(model: Path, sequences: Path) -> None:
    """Print the scores of the sequences in a JSON file, with the model settings of params.yaml."""
    params = load_params()
    setup_torch(params)
    reward_model = load_reward_model(model, params.model)
    scores = reward_scores(reward_model, json.loads(sequences.read_text("utf-8")))
    print(json.dumps(scores.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
