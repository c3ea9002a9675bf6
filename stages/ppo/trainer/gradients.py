"""Losses of policy and critic on a micro-batch, and their gradients.

Dimensions: B episodes of the micro-batch, T tokens of its longest response.
"""

import torch
from torch import Tensor

from stages.lib.core.params.policy import LossLevel, PpoParams
from stages.lib.lm.packing import Packed
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.rollout import Indices, Rollout, RolloutPass

# the metrics of a mini-batch, of which each micro-batch has a share
SHARES = (
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "value_clip_fraction",
    "approx_kl",
    "ratio_mean",
)


def backward(
    roles: Roles,
    params: PpoParams,
    rollout: Rollout,
    packed: Packed,
    micro_batch: Indices,
    mini_batch: list[int],
    rollout_pass: RolloutPass | None,
    counts: bool = True,
) -> dict[str, Tensor]:
    """Accumulate the gradients of a micro-batch: of the policy, then of the critic, so that the
    activations of only one of them are in memory.

    Args:
        roles: policy and critic get gradients.
        params: losses, their weights and clip ranges.
        rollout: all episodes of the update.
        packed: the micro-batch's episodes.
        micro_batch, mini_batch: indices of their episodes. Losses are means over the mini-batch.
        rollout_pass: used in place of a new forward pass, if given.
        counts: false: the passes run, but gradients and shares are 0.

    Returns:
        SHARES: the micro-batch's share of each metric of the mini-batch.
    """
    tokens, episodes, weight = rollout.mask[mini_batch].sum(), len(mini_batch), float(counts)
    # a micro-batch is only as wide as its own longest response
    mask, width = packed.response_mask, packed.response_mask.shape[1]
    old_logprobs, old_values, advantages, returns = (
        column[micro_batch, :width]
        for column in (rollout.logprobs, rollout.values, rollout.advantages, rollout.returns)
    )
    if rollout_pass:
        hidden, logprobs, values = rollout_pass
    else:
        hidden = roles.policy_hidden(packed, [rollout.policy_states[i] for i in micro_batch])
        logprobs = roles.logprobs(packed, hidden, params.temperature)
    policy_loss, clip_fraction = mean_policy_loss(
        params, logprobs, old_logprobs, advantages, mask, tokens, episodes
    )
    loss = policy_loss
    if params.entropy_coef:
        entropies = roles.entropies(packed, hidden, params.temperature)
        loss = loss - params.entropy_coef * entropies.sum() / tokens
    if roles.critic_view:  # else the critic is a head on the policy: one backward pass for both
        (weight * loss).backward()
        loss = torch.zeros_like(loss)
    if not rollout_pass:
        values = roles.values(packed, [rollout.critic_states[i] for i in micro_batch], hidden)
    token_value_loss, value_clipped = F.value_loss(
        values, old_values, returns, params.cliprange_value
    )
    value_loss = (token_value_loss * mask).sum() / tokens
    (weight * (loss + params.vf_coef * value_loss)).backward()
    ratio = (logprobs.detach() - old_logprobs).exp()
    shares = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "clip_fraction": clip_fraction,
        "value_clip_fraction": (value_clipped * mask).sum() / tokens,
        "approx_kl": (F.kl_k3(old_logprobs, logprobs) * mask).sum() / tokens,
        "ratio_mean": (ratio * mask).sum() / tokens,
    }
    return {name: weight * share.detach() for name, share in shares.items()}


def mean_policy_loss(
    params: PpoParams,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tokens: Tensor,
    episodes: int,
) -> tuple[Tensor, Tensor]:
    """A micro-batch's share of the mini-batch's mean loss, per token or per episode
    (`loss_level`), and of the fraction that is clipped.

    Args:
        params: `loss_level` and clip ranges.
        logprobs, old_logprobs, advantages, mask: (B, T).
        tokens, episodes: numbers of the whole mini-batch.
    """
    if params.loss_level is LossLevel.sequence:
        losses, clipped = F.sequence_policy_loss(
            logprobs, old_logprobs, advantages, mask, params.cliprange_sequence
        )
        return losses.sum() / episodes, clipped.sum() / episodes
    losses, clipped = F.policy_loss(logprobs, old_logprobs, advantages, params.cliprange)
    return (losses * mask).sum() / tokens, (clipped * mask).sum() / tokens
