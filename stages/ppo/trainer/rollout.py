"""The record of one rollout: the sampled episodes, and what the four roles computed on them.

Dimensions: B episodes, T tokens of the longest response, L prompt and response tokens of one
episode, H hidden size.
"""

from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import TokenIds
from stages.lib.lm import world
from stages.lib.metrics.stats import mean_with_error
from stages.ppo.trainer import functional as F

Indices = range | list[int]


class RoleOutputs(NamedTuple):
    """The outputs of the four roles on some episodes, without gradients.

    raw_scores: (B,) of the reward model, which reads the response closed by EOS; 0 if it is served
    (`ppo.reward_url`). logprobs,
    entropies, ref_logprobs: (B, T) nats. kl: (B, T) nats, exact KL of the policy to the reference
    at each token. values: (B, T). mask: (B, T) bool, true on response
    tokens; the other (B, T) fields are 0 outside it. policy_states, critic_states: per episode,
    (L, H) states below the adapters, which are the same in every epoch; empty for the episodes of
    other processes.
    """

    raw_scores: Tensor
    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    values: Tensor
    mask: Tensor
    policy_states: list[Tensor]
    critic_states: list[Tensor]

    def select(self, episodes: list[int]) -> "RoleOutputs":
        """The outputs on some of the episodes, by index."""
        columns: Any = (
            [column[i] for i in episodes] if isinstance(column, list) else column[episodes]
            for column in self
        )
        return RoleOutputs(*columns)


class RolloutPass(NamedTuple):
    """The rollout's forward pass with gradients: (M, H) last states of the policy, (B, T)
    log-probabilities and values.
    """

    hidden: Tensor
    logprobs: Tensor
    values: Tensor


@dataclass(frozen=True)
class Rollout:
    """One rollout of B episodes, without those whose rewards failed. Fields that are not explained
    here are those of `RoleOutputs`.

    rows: the prompts' rows. prompts, responses: tokens per episode. texts: the responses decoded.
    ended: (B,) bool, an end token was sampled. parts: scores of the further rewards, by name.
    failed_share: share of the sampled episodes that was left out; None: no reward can fail.
    failures: one line per reward and reason. calibrated: (B,) raw_scores, or the served scores, in
    standard deviations of SFT demonstrations. scores: (B,) the weighted sum of calibrated and
    parts, clipped and penalised. advantages (whitened), returns: (B, T). sampler_log_ratio: see
    `Roles`. own: indices of the episodes that this process trains on.
    """

    rows: list[TrainingPrompt]
    prompts: list[TokenIds]
    responses: list[TokenIds]
    texts: list[str]
    ended: Tensor
    parts: dict[str, list[float]]
    failed_share: float | None
    failures: list[str]
    raw_scores: Tensor
    calibrated: Tensor
    scores: Tensor
    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    sampler_log_ratio: float | None
    mask: Tensor
    policy_states: list[Tensor]
    critic_states: list[Tensor]
    own: Indices

    @property
    def sequence_kl(self) -> Tensor:
        """(B,) KL of the policy to the reference, nats per sequence: the sum over the response.

        Its mean estimates the KL of sequences without bias, with less variance than log-ratios.
        """
        return self.kl.sum(1)


def concat_outputs(micro_batches: list[RoleOutputs]) -> RoleOutputs:
    """The outputs of all micro-batches, one after the other."""
    columns = zip(*micro_batches, strict=True)
    return RoleOutputs(*(concat_padded(list(column)) for column in columns))


def gather_outputs(outputs: RoleOutputs) -> RoleOutputs:
    """The outputs on the episodes of all processes; states stay in the process that trains on
    them.
    """
    if world.size() == 1:
        return outputs
    device = outputs.mask.device
    gathered: dict[str, Any] = {
        name: concat_padded(world.gather([column.cpu()])).to(device)
        for name, column in outputs._asdict().items()
        if isinstance(column, Tensor)
    }
    count, nothing = len(gathered["mask"]), torch.empty(0, device=device)
    own = world.share(count)
    policy_states, critic_states = (
        [nothing] * own.start + states + [nothing] * (count - own.stop)
        for states in (outputs.policy_states, outputs.critic_states)
    )
    return RoleOutputs(**gathered, policy_states=policy_states, critic_states=critic_states)


def concat_padded(parts: list[Any]) -> Any:
    """Concatenate along rows: lists, (b,) tensors, or (b, t) tensors padded to the longest t."""
    if isinstance(parts[0], list):
        return list(chain(*parts))
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def describe(rollout: Rollout, sft_length: float) -> dict[str, float]:
    """Metrics of a rollout: scores, KL (nats per sequence, and over the length of SFT's responses,
    `sft_length` tokens, with its standard error), entropy (nats per token), length (tokens),
    critic.
    """
    lengths = rollout.mask.sum(1).tolist()
    kl, kl_error = mean_with_error(rollout.sequence_kl.tolist())
    parts = {f"score_{name}": fmean(scores) for name, scores in rollout.parts.items()}
    if rollout.failed_share is not None:
        parts["reward_failed_share"] = rollout.failed_share
    gap = rollout.sampler_log_ratio
    engine = {} if gap is None else {"sampler_log_ratio": gap}
    return (
        engine
        | parts
        | {
            "score_mean": float(rollout.calibrated.mean()),
            "score_std": float(rollout.calibrated.std()),
            "reward_mean": float(rollout.scores.mean()),
            "reward_std": float(rollout.scores.std()),
            "kl": kl,
            "kl_per_token": kl / sft_length,
            "kl_per_token_se": kl_error / sft_length,
            "entropy": float(F.masked_mean(rollout.entropies, rollout.mask)),
            "response_length": fmean(lengths),
            "eos_rate": float(rollout.ended.float().mean()),
            "explained_variance": F.explained_variance(
                rollout.values, rollout.returns, rollout.mask
            ),
            "value_mean": float(F.masked_mean(rollout.values, rollout.mask)),
            "return_mean": float(F.masked_mean(rollout.returns, rollout.mask)),
        }
    )
