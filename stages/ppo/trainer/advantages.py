"""The online algorithms: what each makes of the rewards of a rollout, and the loss that it lowers.

Shapes as in functional.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stages.lib.core.params.policy import KlControl, LossLevel, PpoParams
from stages.ppo.trainer import functional as F

# (B, T) rewards and values, mask -> (B, T) advantages, and returns for the critic
AdvantageFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# logprobs, old_logprobs, advantages, mask, cliprange -> losses and whether each is clipped: (B, T)
# per token, or (B,) per episode
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
    kl_coef: float  # at first
    kl_rule: Callable[[float, float], float]  # how it changes


def ppo(params: PpoParams) -> OnlineAlgorithm:
    """PPO (Schulman et al. 2017), or with the ratio of sequences GSPO (Zheng et al. 2025)."""

    def advantages(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
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
    )
