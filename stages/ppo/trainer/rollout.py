"""What a rollout has, and its metrics.

Dimensions: B episodes, T tokens of the longest response.
"""

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from stages.lib.core.rows import TrainingPrompt
from stages.lib.lm.packing import Packed
from stages.lib.lm.responses import Response
from stages.lib.metrics.stats import mean_with_error
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.roles import RoleOutputs

Indices = range | list[int]


@dataclass(frozen=True, kw_only=True)
class Rollout(RoleOutputs):
    """One rollout of B episodes, without those whose rewards failed."""

    rows: list[TrainingPrompt]  # of the prompts
    responses: list[Response]
    parts: dict[str, list[float]]  # scores of the further rewards, by name
    failed_share: float | None  # of the sampled episodes, left out; None: no reward can fail
    failures: list[str]  # one line per reward and reason
    # (B,) raw or served scores, in standard deviations of SFT demonstrations; without a reward
    # model the weighted sum of the parts
    calibrated: Tensor
    scores: Tensor  # (B,) weighted sum of calibrated and parts, clipped and penalised
    policy_mask: Tensor  # (B, T) bool: tokens of the mask that the policy's loss has
    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T) for the critic
    sampler_log_ratios: Tensor | None  # (B, T) nats; see `Roles`
    own: Indices  # the episodes that this process trains on

    @property
    def sequence_kl(self) -> Tensor:
        """(B,) KL of the policy to the reference, nats per sequence: the sum over the response.

        Its mean estimates the KL of sequences without bias, with less variance than log-ratios.
        """
        return self.kl.sum(1)


@dataclass(frozen=True)
class MicroBatch:
    """Some episodes of a rollout, whose losses are shares of their mini-batch's means.

    episodes, mini_batch: indices. weight: 0: the passes run, but gradients and shares are 0.
    """

    rollout: Rollout
    packed: Packed
    episodes: Indices
    mini_batch: list[int]
    weight: float

    @property
    def tokens(self) -> Tensor:
        """Response tokens of the mini-batch."""
        return self.rollout.mask[self.mini_batch].sum()

    def columns(self, *columns: Tensor) -> list[Tensor]:
        """The rows of (B, T) tensors of the rollout, as wide as the longest response here."""
        width = self.packed.response_mask.shape[1]
        return [column[self.episodes, :width] for column in columns]


def describe(rollout: Rollout, sft_length: float, has_critic: bool = True) -> dict[str, float]:
    """Metrics of a rollout: scores, KL (nats per sequence, and over the length of SFT's responses,
    `sft_length` tokens, with its standard error), entropy (nats per token), length (tokens),
    critic.
    """
    kl, kl_error = mean_with_error(rollout.sequence_kl.tolist())
    metrics = {f"score_{name}": fmean(scores) for name, scores in rollout.parts.items()}
    if rollout.sampler_log_ratios is not None:
        gap = F.masked_mean(rollout.sampler_log_ratios.abs(), rollout.mask)
        metrics = {"sampler_log_ratio": float(gap)} | metrics
    if rollout.failed_share is not None:
        metrics["reward_failed_share"] = rollout.failed_share
    metrics |= {
        "score_mean": float(rollout.calibrated.mean()),
        "score_std": float(rollout.calibrated.std()),
        "reward_mean": float(rollout.scores.mean()),
        "reward_std": float(rollout.scores.std()),
        "kl": kl,
        "kl_per_token": kl / sft_length,
        "kl_per_token_se": kl_error / sft_length,
        "entropy": float(F.masked_mean(rollout.entropies, rollout.mask)),
        "response_length": fmean(rollout.mask.sum(1).tolist()),
        "eos_rate": float(torch.tensor([r.ended for r in rollout.responses]).float().mean()),
    }
    if has_critic:
        metrics |= {
            "explained_variance": F.explained_variance(
                rollout.values, rollout.returns, rollout.mask
            ),
            "value_mean": float(F.masked_mean(rollout.values, rollout.mask)),
            "return_mean": float(F.masked_mean(rollout.returns, rollout.mask)),
        }
    return metrics
