"""The online algorithms: what each makes of the rewards of a rollout, and the loss that it lowers.

A new one is a function here and a row in ONLINE. Shapes as in functional.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm, KlControl, LossLevel, PpoParams
from stages.ppo.common.health import KL_KEY
from stages.ppo.trainer import functional as F

# (B, T) rewards and values, mask, (B,) numbers of the prompts -> (B, T) advantages, returns
AdvantageFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# logprobs, old_logprobs, advantages, mask, cliprange -> losses and whether each is clipped: (B, T)
# per token, or (B,) per response
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

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
    cliprange: float
    kl_coef: float  # beta at first
    kl_rule: Callable[[float, float], float] = F.fixed  # how beta changes
    kl_key: str = KL_KEY  # beta in params.yaml
    kl_in_loss: bool = False  # beta * k3 per token in the loss; else -beta * k1 in the rewards
    has_critic: bool = False
    samples_per_prompt: int = 1


def ppo(params: PpoParams) -> OnlineAlgorithm:
    """PPO (Schulman et al. 2017), or with the ratio of sequences GSPO (Zheng et al. 2025)."""

    def advantages(
        rewards: Tensor, values: Tensor, mask: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        if params.whiten_rewards:
            rewards = F.whiten(rewards, mask, shift_mean=False)
        raw, returns = F.gae(rewards, values, mask, params.gamma, params.lam)
        return F.whiten(raw, mask), returns

    per_sequence = params.loss_level is LossLevel.sequence
    return OnlineAlgorithm(
        advantages=advantages,
        loss=F.sequence_policy_loss if per_sequence else F.token_policy_loss,
        cliprange=params.cliprange_sequence if per_sequence else params.cliprange,
        kl_coef=params.kl_coef,
        kl_rule=KL_RULES[params.kl_control],
        has_critic=True,
    )


def rloo(params: Params) -> OnlineAlgorithm:
    """RLOO (Ahmadian et al. 2024): a response is compared with the others to its prompt; the KL is
    subtracted from the rewards. The loss is a mean over responses.
    """
    return OnlineAlgorithm(
        advantages=per_response(leave_one_out),
        loss=F.response_policy_loss,
        cliprange=params.ppo.cliprange,
        kl_coef=params.rloo.beta,
        kl_key="rloo.beta",
        samples_per_prompt=params.rloo.num_generations,
    )


def grpo(params: Params) -> OnlineAlgorithm:
    """GRPO (Shao et al. 2024): rewards are standardised among the responses to a prompt. The loss
    is a mean over the tokens of a response, then over responses.

    The KL (k3) is a term of the loss, multiplied by the probability ratio, because its gradient
    would be biased without it (DeepSeek-V3.2, 2025).
    """
    return OnlineAlgorithm(
        advantages=per_response(group_mean),
        loss=F.response_mean_policy_loss,
        cliprange=params.ppo.cliprange,
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


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,) distances from the mean of the group, over its standard deviation (unbiased) plus 1e-4;
    0 without others.

    >>> group_mean(torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    tensor([-0.9999,  0.0000,  0.9999,  0.0000])
    """
    same = (groups[:, None] == groups).to(rewards.dtype)
    number = same.sum(1)
    distances = rewards - same @ rewards / number
    deviations = (same @ distances**2 / (number - 1)).sqrt()
    return torch.where(number > 1, distances / (deviations + 1e-4), 0.0)
