"""The online algorithms: what each makes of the rewards of a rollout, and the loss that it lowers.

A new one is a function here and a row in ONLINE. Shapes as in functional.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stages.lib.core.params import Params
from stages.lib.core.params.policy import (
    Algorithm,
    GrpoLoss,
    KlControl,
    LossLevel,
    PpoParams,
    ScaleRewards,
)
from stages.ppo.common.health import KL_KEY
from stages.ppo.trainer import functional as F

# (B, T) rewards and values, mask, (B,) numbers of the prompts -> (B, T) advantages, returns
AdvantageFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# logprobs, old_logprobs, advantages, mask, clip -> losses and whether each is clipped: (B, T) per
# token, or (B,) per response
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, F.Clip], tuple[Tensor, Tensor]]

KL_RULES = {
    KlControl.adaptive: F.ziegler,
    KlControl.proportional: F.proportional,
    KlControl.fixed: F.fixed,
}


@dataclass(frozen=True)
class OnlineAlgorithm:
    """An algorithm that trains on the policy's own responses."""

    advantages: AdvantageFunction
    loss: LossFunction
    clip: F.Clip
    kl_coef: float  # beta at first
    kl_rule: Callable[[float, float], float] = F.fixed  # how beta changes
    kl_key: str = KL_KEY  # beta in params.yaml
    kl_in_loss: bool = False  # beta * k3 per token in the loss; else -beta * k1 in the rewards
    # of the tokens of a mini-batch in its loss; losses per response have equal ones
    weights: Callable[[Tensor, Tensor, int], Tensor] = F.token_mean
    has_critic: bool = False
    samples_per_prompt: int = 1


def ppo(params: PpoParams) -> OnlineAlgorithm:
    """PPO (Schulman et al. 2017), or with the ratio of sequences GSPO (Zheng et al. 2025)."""

    def advantages(
        rewards: Tensor, values: Tensor, mask: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        if params.whiten_rewards:
            rewards = F.whiten(rewards, mask, shift_mean=False)
        raw, _ = F.gae(rewards, values, mask, params.gamma, params.lam)
        # the critic learns returns without its own values in them (VC-PPO, arXiv 2503.01491)
        _, returns = F.gae(rewards, values, mask, params.gamma, 1.0)
        return F.whiten(raw, mask), returns

    per_sequence = params.loss_level is LossLevel.sequence
    return OnlineAlgorithm(
        advantages=advantages,
        loss=F.sequence_policy_loss if per_sequence else F.token_policy_loss,
        clip=F.Clip(*[params.cliprange_sequence] * 2) if per_sequence else clip_of(params),
        kl_coef=params.kl_coef,
        kl_rule=KL_RULES[params.kl_control],
        has_critic=True,
    )


def clip_of(params: PpoParams) -> F.Clip:
    """Of the ratio per token, or RLOO's per response."""
    high = params.cliprange if params.cliprange_high is None else params.cliprange_high
    return F.Clip(params.cliprange, high, math.inf if params.delta is None else params.delta)


def rloo(params: Params) -> OnlineAlgorithm:
    """RLOO (Ahmadian et al. 2024): a response is compared with the others to its prompt; the KL is
    subtracted from the rewards. The loss is a mean over responses.
    """
    return OnlineAlgorithm(
        advantages=per_response(leave_one_out),
        loss=F.response_policy_loss,
        clip=clip_of(params.ppo),
        kl_coef=params.rloo.beta,
        kl_key="rloo.beta",
        samples_per_prompt=params.rloo.num_generations,
    )


def grpo(params: Params) -> OnlineAlgorithm:
    """GRPO (Shao et al. 2024): rewards are compared among the responses to a prompt.

    The KL (k3) is a term of the loss, multiplied by the probability ratio, because its gradient
    would be biased without it (DeepSeek-V3.2, 2025).
    """
    scale, length = params.grpo.scale_rewards, params.ppo.response_length
    return OnlineAlgorithm(
        advantages=per_response(partial(group_mean, scale=scale)),
        loss=F.token_policy_loss,
        clip=clip_of(params.ppo),
        weights={
            GrpoLoss.grpo: F.response_mean,
            GrpoLoss.dapo: F.token_mean,
            GrpoLoss.dr_grpo: F.constant_length(length),
        }[params.grpo.loss_type],
        kl_coef=params.grpo.beta,
        kl_key="grpo.beta",
        kl_in_loss=True,
        samples_per_prompt=params.grpo.num_generations,
    )


ONLINE: dict[Algorithm, Callable[[Params], OnlineAlgorithm]] = {
    Algorithm.ppo: lambda params: ppo(params.ppo),
    Algorithm.rloo: rloo,
    Algorithm.grpo: grpo,
}


def per_response(function: Callable[[Tensor, Tensor], Tensor]) -> AdvantageFunction:
    """Advantages of whole responses, which each of their tokens has; no returns.

    Args:
        function: (B,) sums of the rewards of each response, (B,) numbers of their prompts -> (B,)
            advantages.
    """

    def advantages(
        rewards: Tensor, _: Tensor, mask: Tensor, groups: Tensor
    ) -> tuple[Tensor, Tensor]:
        of_tokens = function(rewards.sum(1), groups)[:, None] * mask
        return of_tokens, torch.zeros_like(of_tokens)

    return advantages


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,) rewards less the mean of the others in their group; 0 without others.

    >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    tensor([-3.0000, -1.5000,  4.5000,  0.0000])
    """
    same = (groups[:, None] == groups).to(rewards.dtype)
    others = same.sum(1) - 1
    return torch.where(others > 0, rewards - (same @ rewards - rewards) / others, 0.0)


def group_mean(rewards: Tensor, groups: Tensor, scale: ScaleRewards = ScaleRewards.group) -> Tensor:
    """(B,) distances from the mean of the group, over the standard deviation (unbiased) of the
    group, or of all rewards, plus 1e-4, or as they are; 0 without others in the group.

    >>> group_mean(torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    tensor([-0.9999,  0.0000,  0.9999,  0.0000])
    """
    same = (groups[:, None] == groups).to(rewards.dtype)
    number = same.sum(1)
    distances = rewards - same @ rewards / number
    if scale is ScaleRewards.none:
        return distances
    deviations = (same @ distances**2 / (number - 1)).sqrt()
    if scale is ScaleRewards.batch:
        deviations = rewards.std().expand_as(rewards)
    return torch.where(number > 1, distances / (deviations + 1e-4), 0.0)
