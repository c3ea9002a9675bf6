"""The mathematics of PPO-RLHF on plain tensors.

Dimensions: B episodes, T response tokens (padded on the right, mask (B, T) true on real tokens), V
vocabulary. All probabilities are natural logarithms, so every KL is in nats.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the true entries of `mask`."""
    return (values * mask).sum() / mask.sum()


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(B, T) log p - log q on samples of p: an unbiased estimate of KL(p, q), of either sign
    (Schulman 2020, k1).

    This is the penalty in the rewards, because a policy gradient treats a reward as a constant: it
    computes E_p[reward * grad log p]. With k1 as the reward that is exactly grad KL(p, q). With k3
    it is grad KL(p, q) - grad KL(q, p). The two terms nearly cancel where p is close to q, so k3
    would not hold the policy near the reference.

    Args:
        logprobs: (B, T) log p of the sampled tokens, under the policy that sampled them.
        ref_logprobs: (B, T) log q of the same tokens, under the reference.

    Example:
        >>> kl_k1(torch.tensor([[-2.0]]), torch.tensor([[-2.5]]))
        tensor([[0.5000]])
    """
    return logprobs - ref_logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(B, T) (q/p - 1) - log(q/p) on samples of p: an unbiased estimate of KL(p, q), never negative
    (Schulman 2020, k3).

    In metrics an estimate with a lower variance; times the probability ratio GRPO's term of the
    loss. As a reward its policy gradient is not that of the KL (see `kl_k1`).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    """Rewards per token: -kl_coef * k1 at every token, plus the episode's score at its last token.

    Source: Ziegler et al. 2019, eq. 2; InstructGPT, section 3.5. `kl_k1` explains why k1.

    Args:
        scores: (B,) score of each episode.
        logprobs, ref_logprobs: (B, T) nats, under the policy that sampled and under the reference.
        mask: (B, T) bool.
        kl_coef: beta, score units per nat.

    Returns:
        (B, T) rewards, 0 outside the mask.
    """
    rewards = -kl_coef * kl_k1(logprobs, ref_logprobs) * mask
    last = mask.sum(1) - 1
    return rewards + torch.nn.functional.one_hot(last, mask.shape[1]) * scores[:, None]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    Args:
        rewards, values: (B, T); values[:, t] is the critic's estimate before token t.
        mask: (B, T) bool.
        gamma, lam: discount, and the weight of longer returns.

    Returns:
        (B, T) advantages and returns, 0 outside the mask. Returns are advantages + values, before
        any whitening.
    """
    values = values * mask
    advantages = torch.zeros_like(rewards)
    advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        # the value after the last token is 0, since the episode ends there
        next_values = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(advantage)
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        # padding is on the right: the mask keeps the sum 0 until the episode's last token
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        advantages[:, t] = advantage
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(B, T) values with masked variance 1 and, if `shift_mean`, mean 0; zero outside the mask."""
    # the population variance: only a scale is needed, and a single token gives 0, not NaN
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    scaled = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (scaled if shift_mean else scaled + mean) * mask


class Clip(NamedTuple):
    """Of the probability ratio: to 1 - low, 1 + high; for negative advantages to delta (dual clip,
    Ye et al. 2020).
    """

    low: float
    high: float
    delta: float = math.inf


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss per token (Schulman et al. 2017, eq. 7, negated to be minimised).

    Args:
        logprobs, old_logprobs: nats, under the policy now and under the one that sampled.
        advantages: of the same shape.
        clip: of the probability ratio.

    Returns:
        The loss, and a bool per token: whether the clipped term is the larger one.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio.clamp(max=clip.delta)
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def token_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """PPO and GRPO: (B, T) clipped surrogate loss per token, and whether the clipped term is the
    larger one; 0 outside the mask.
    """
    losses, clipped = policy_loss(logprobs, old_logprobs, advantages, clip)
    return losses * mask, clipped * mask


def sequence_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """(B,) clipped surrogate loss per sequence, and whether the clipped term is the larger one; 0
    for a sequence without tokens in the mask.

    The ratio is that of whole sequences to the power of 1 / length, so that one cliprange fits all
    lengths; the advantage is the mean of the tokens' (Zheng et al. 2025, GSPO, eq. 5 and 7).
    """
    lengths = mask.sum(1).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum(1) / lengths

    return policy_loss(mean(logprobs), mean(old_logprobs), mean(advantages), clip)


def response_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """RLOO: (B,) clipped surrogate loss per response, and whether the clipped term is the larger
    one. The ratio is that of whole responses; all tokens of one have its advantage.
    """
    response, old_response = ((values * mask).sum(1) for values in (logprobs, old_logprobs))
    return policy_loss(response, old_response, advantages[:, 0] * mask[:, 0], clip)


def importance_weights(log_ratios: Tensor, most: float) -> Tensor:
    """The policy's probability over that of the sampler, at most `most`: with them, the gradient on
    samples of the sampler is that on samples of the policy but for what is cut off (truncated
    importance sampling, Yao et al. 2025).

    Args:
        log_ratios: log p - log p_sampler of tokens or of whole responses, in nats.
    """
    return log_ratios.exp().clamp(max=most)


def token_mean(mask: Tensor, tokens: Tensor, _: int) -> Tensor:
    """(B, T) weights of a mean over the tokens of a mini-batch (PPO; DAPO, arXiv 2503.14476).

    Args:
        mask: (B, T) bool, of some of its episodes.
        tokens: true entries of the masks of the whole mini-batch.
    """
    return mask / tokens


def response_mean(mask: Tensor, _: Tensor, episodes: int) -> Tensor:
    """(B, T) weights of a mean over the tokens of each response, then over the `episodes` of the
    mini-batch (GRPO): a token of a long response weighs less (Liu et al. 2025, arXiv 2503.20783).
    """
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / episodes


def constant_length(length: int) -> Callable[[Tensor, Tensor, int], Tensor]:
    """(B, T) weights of sums over each response, over a constant `length` (Dr. GRPO)."""
    return lambda mask, _, episodes: mask / (length * episodes)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, or that of the clipped value if it is larger (InstructGPT;
    N+ details).

    Returns:
        The loss, and a bool per token: whether the error of the clipped value is the larger one.
    """
    # clamped around old_values, not old + clamped difference: an unclipped value must stay equal to
    # the bit, or rounding would count it as clipped
    clipped_values = values.clamp(old_values - cliprange, old_values + cliprange)
    unclipped, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 is no better than a constant. NaN
    if returns are constant.
    """
    mask = mask.bool()
    return_variance = returns[mask].var(unbiased=False)
    if not return_variance > 0:
        return float("nan")
    return float(1 - (returns - values)[mask].var(unbiased=False) / return_variance)


def ziegler(error: float, share: float) -> float:
    """Factor on beta for a relative error of the KL, over a `share` of the horizon (Ziegler et al.
    2019, eq. 4).

    The share counts as 1 at most: a batch of many horizons would else swing beta from one bound to
    the other. So the factor is 0.8 to 1.2.
    """
    return 1 + min(max(error, -0.2), 0.2) * min(share, 1.0)


def proportional(error: float, _: float) -> float:
    """Factor on beta that corrects the whole relative error at once, at least 0.5 and at most 2."""
    return min(max(1 + error, 0.5), 2.0)


def fixed(_: float, __: float) -> float:
    """Factor 1: beta does not change."""
    return 1.0


class AdaptiveKLController:
    """Adapts beta (`kl_coef`) so that the KL follows a target.

    Beta never falls below its initial value: KL usually starts at 0, and in a short run beta would
    fall so far before the KL reaches the target that it could not recover in time.

    Args:
        kl_coef: initial beta, score units per nat.
        target: nats per token.
        horizon: episodes.
        rule: the factor on beta, from the relative error and the share of the horizon.
    """

    def __init__(
        self,
        kl_coef: float,
        target: float,
        horizon: int,
        rule: Callable[[float, float], float] = ziegler,
    ) -> None:
        self.kl_coef, self.target, self.horizon, self.rule = kl_coef, target, horizon, rule
        self.min_kl_coef = kl_coef

    def update(self, kl: float, episodes: int) -> None:
        """Change beta after `episodes` whose KL was `kl` nats per token."""
        factor = self.rule(kl / self.target - 1, episodes / self.horizon)
        self.kl_coef = max(self.kl_coef * factor, self.min_kl_coef)
