"""Whether the reward model and the policy descend from the same model."""

import math
from typing import Any

import torch


@torch.no_grad()
def lineage_distance(reward_model: Any, sft: Any) -> float:
    """Distance of the reward model's weights from SFT's, relative to SFT's: |R - S| / |S|.

    All weights but the heads count, as one vector. Models that were pretrained apart have nearly
    orthogonal weights, so the distance is 1 or more. A weight of SFT that the reward model does not
    have, or has in another shape, counts as 0 there.

    Args:
        reward_model: a sequence classifier; of an ensemble, the first member.
        sft: the causal language model that PPO starts from.
    """
    others = reward_model.base_model.state_dict()
    length, distance = 0.0, 0.0
    for name, weight in sft.base_model.state_dict().items():
        start = weight.float()
        other = others.get(name)
        same = other is not None and other.shape == start.shape
        difference = start - other.float() if same else start
        length += float(start.square().sum())
        distance += float(difference.square().sum())
    return math.sqrt(distance / length)
