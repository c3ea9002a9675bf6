"""Ensembles of reward models: members, combined scores, calibration."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import Reduce
from stages.lib.lm.packing import unwrap_peft

MEMBERS = "members"  # subfolder of a reward model with the further members of its ensemble


def attach_ensemble(
    reward_model: PreTrainedModel, others: list[PreTrainedModel]
) -> PreTrainedModel:
    """Attach the further members to the first one, and return it.

    Training and saving the model ignore them; `ensemble_members` and `ensemble_scores` find them.
    """
    # A list, not a ModuleList, so that the members are no submodules of the first one
    reward_model.ensemble = others
    return reward_model


def ensemble_members(reward_model: Any) -> list[Any]:
    """The reward model and the further members of its ensemble."""
    return [reward_model, *getattr(unwrap_peft(reward_model), "ensemble", [])]


def ensemble_scores(reward_model: Any, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Raw scores of an ensemble, in the units of its first member.

    So an ensemble can be used like one reward model, with the calibration of the first member: its
    calibrated scores of SFT demonstrations have mean 0 and standard deviation 1
    (`config.ensemble_mean`, `config.ensemble_std`).

    Args:
        reward_model: the first member.
        read: returns one member's (B,) raw scores.

    Returns:
        (B,) scores: mean or minimum (`config.ensemble_reduce`) of the calibrated scores,
        standardised again, because a mean varies less than its terms and a minimum is lower, and
        converted back. Without further members, the raw scores of the one model.
    """
    first, *others = ensemble_members(reward_model)
    raw = read(first)
    if not others:
        return raw
    scores = torch.stack(
        [
            calibrate_scores(raw, first),
            *(calibrate_scores(read(member), member) for member in others),
        ]
    )
    config = first.config
    reduced = scores.amin(0) if config.ensemble_reduce == Reduce.min.value else scores.mean(0)
    standardised = (reduced - config.ensemble_mean) / config.ensemble_std
    return standardised * config.std + config.mean


def calibrate_scores(raw: torch.Tensor, reward_model: Any) -> torch.Tensor:
    """Raw scores in standard deviations above the mean score of SFT demonstrations.

    Raises:
        BadInput: the reward model has no calibration.
    """
    config = reward_model.config
    if not hasattr(config, "std"):
        raise BadInput(
            f"{config.name_or_path}/config.json: no mean and std of its scores, which Rondo's "
            "reward stage writes: name a model of that stage, or add them"
        )
    return (raw - config.mean) / config.std
