"""Several reward models as one: members, combined scores, calibration."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`
from stages.lib.core.params.shared import Reduce
from stages.lib.lm.packing import unwrap_peft

MEMBERS = "members"  # folder, within a reward model's, of the further members of its ensemble


def attach_ensemble(
    reward_model: PreTrainedModel, others: list[PreTrainedModel]
) -> PreTrainedModel:
    """The model that now knows the further members: `members` and `combined` find them again,
    nothing that trains or saves it does.
    """
    reward_model.ensemble = others
    return reward_model


def ensemble_members(reward_model: Any) -> list[Any]:
    """A reward model and the further members of its ensemble."""
    return [reward_model, *getattr(unwrap_peft(reward_model), "ensemble", [])]


def ensemble_scores(reward_model: Any, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """(B,) raw scores of an ensemble, in the units of its first member, so that nothing else need
    know that there are several.

    `read` gives one member's raw scores; the members' calibrated scores are reduced as
    `config.ensemble_reduce` says.
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
    reduced = scores.amin(0) if first.config.ensemble_reduce == Reduce.min.value else scores.mean(0)
    return reduced * first.config.std + first.config.mean


def calibrate_scores(raw: torch.Tensor, reward_model: Any) -> torch.Tensor:
    """Raw scores in standard deviations from the mean score of SFT demonstrations."""
    return (raw - reward_model.config.mean) / reward_model.config.std
