"""The mathematics of PPO-RLHF on plain tensors.

Dimensions: B episodes, T response tokens (padded on the right, mask (B, T) true on real tokens), V
vocabulary. All probabilities are natural logarithms, so every KL is in nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the true entries of `mask`."""
    return (values * mask).sum() / mask.sum()


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(B, T) log p - log q on samples of p: unbiased for KL(p, q), of either sign (Schulman 2020,
    k1).
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(B, T) half the squared log-ratio on samples of p: biased, never negative, of low variance
    (Schulman 2020, k2). For logging only.
    """
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(B, T) (q/p - 1) - log(q/p) on samples of p: unbiased, never negative (Schulman 2020, k3).
    For logging only.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    """(B, T) rewards: -kl_coef * k1 at every token, and the episode's score at its last one.

    scores: (B,). Source: Ziegler et al. 2019, eq. 2; InstructGPT, section 3.5.
    """
    rewards = -kl_coef * kl_k1(logprobs, ref_logprobs) * mask
    last = mask.sum(1) - 1
    return rewards + torch.nn.functional.one_hot(last, mask.shape[1]) * scores[:, None]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (B, T) advantages and
    returns.

    The value after the last token is 0, since the episode ends there. Returns are advantages +
    values, before any whitening.
    """
    values = values * mask
    advantages = torch.zeros_like(rewards)
    carried = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(carried)
        delta = rewards[:, t] + gamma * following - values[:, t]
        carried = (delta + gamma * lam * carried) * mask[:, t]
        advantages[:, t] = carried
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(B, T) values with masked variance 1 and, if `shift_mean`, mean 0; zero outside the mask."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    scaled = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (scaled if shift_mean else scaled + mean) * mask


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate for each token, to be minimised, and whether the clip decided it (Schulman
    et al. 2017, eq. 7).
    """
    ratio = (logprobs - old_logprobs).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(plain, clipped), clipped > plain


def sequence_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """(B,) clipped surrogate for each sequence, and whether the clip decided it.

    The ratio is that of whole sequences to the power of 1 / length, so that one cliprange fits all
    lengths; the advantage is the mean of the tokens' (Zheng et al. 2025, GSPO, eq. 5 and 7).
    """
    lengths = mask.sum(1)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum(1) / lengths

    return policy_loss(mean(logprobs), mean(old_logprobs), mean(advantages), cliprange)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error for each token, pessimistic under clipping, and whether the clip
    decided it (InstructGPT; N+ details).
    """
    near = values.clamp(
        old_values - cliprange, old_values + cliprange
    )  # values itself, to the bit, where it is not clipped
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 is no better than a constant. NaN
    if returns are constant.
    """
    kept = mask.bool()
    spread = returns[kept].var(unbiased=False)
    return (
        float(1 - (returns - values)[kept].var(unbiased=False) / spread)
        if spread > 0
        else float("nan")
    )


def ziegler(error: float, share: float) -> float:
    """Factor on beta for a relative error of KL, over a `share` of the horizon (Ziegler et al.
    2019, eq. 4).
    """
    return 1 + min(max(error, -0.2), 0.2) * share


def proportional(error: float, _: float) -> float:
    """Factor on beta: all of the relative error at once, at most to half or twice of itself."""
    return min(max(1 + error, 0.5), 2.0)


def fixed(_: float, __: float) -> float:
    """Beta stays."""
    return 1.0


class AdaptiveKLController:
    """Beta follows a KL target by `rule`. KL in nats a sequence, horizon in episodes.

    Beta does not fall below where it starts: KL starts at 0, and a short run would have wound beta
    down by the time it needs it.
    """

    def __init__(
        self,
        kl_coef: float,
        target: float,
        horizon: int,
        rule: Callable[[float, float], float] = ziegler,
    ) -> None:
        self.kl_coef, self.target, self.horizon, self.rule = kl_coef, target, horizon, rule
        self.least = kl_coef

    def update(self, kl: float, episodes: int) -> None:
        self.kl_coef = max(
            self.kl_coef * self.rule(kl / self.target - 1, episodes / self.horizon), self.least
        )
