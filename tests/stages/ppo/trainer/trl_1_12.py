# Copyright 2020-2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""PPO as TRL 1.12.0 computes it: an oracle for test_trl.py, not to be tidied.

From trl/experimental/ppo/ppo_trainer.py and first_true_indices of trl/experimental/utils.py,
release 1.12.0, the last one with PPOTrainer. Changed: `PPOTrainer.train` is cut into functions;
`args.`, `self.` and `[micro_batch_inds]` are gone; helpers have lost their docstrings.

TRL's conventions: B episodes, T columns. sequence_lengths is the index of the last token.
padding_mask is true on padding, and padding_mask_p1 on all of it but its first column. values[:, t]
is the value before token t: in that column, after the last token.
"""

# fmt: off
import torch

INVALID_LOGPROB = 1.0


def first_true_indices(bools: torch.Tensor, dtype=torch.long) -> torch.Tensor:
    row_len = bools.size(-1)
    indices = torch.arange(row_len, dtype=dtype, device=bools.device)
    zero_or_index = row_len * (~bools).type(dtype) + indices
    return torch.min(zero_or_index, dim=-1).values


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: bool | None = None) -> torch.Tensor:
    if axis is not None:
        return (values * mask).sum(axis=axis) / mask.sum(axis=axis)
    else:
        return (values * mask).sum() / mask.sum()


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    mean = masked_mean(values, mask)
    centered_values = values - mean
    variance = masked_mean(centered_values**2, mask)
    if unbiased:
        mask_sum = mask.sum()
        if mask_sum == 0:
            raise ValueError(
                "The sum of the mask is zero, which can happen when `mini_batch_size=1`;"
                "try increase the `mini_batch_size` or `gradient_accumulation_steps`"
            )
        # note that if mask_sum == 1, then there is a division by zero issue
        # to avoid it you just need to use a larger minibatch_size
        bessel_correction = mask_sum / (mask_sum - 1)
        variance = variance * bessel_correction
    return variance


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True
) -> torch.Tensor:
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        whitened += mean
    return whitened


# What follows is out of PPOTrainer.train, in its order.


def masks(responses, pad_token_id):
    sequence_lengths = first_true_indices(responses == pad_token_id) - 1
    positions = torch.arange(responses.shape[1], device=responses.device)
    response_idxs = positions.repeat(responses.shape[0], 1)
    padding_mask = response_idxs > sequence_lengths.unsqueeze(1)
    sequence_lengths_p1 = sequence_lengths + 1
    padding_mask_p1 = response_idxs > (sequence_lengths_p1.unsqueeze(1))
    return sequence_lengths, padding_mask, padding_mask_p1


def penalised(scores, postprocessed_responses, eos_token_id, missing_eos_penalty):
    scores = scores.clone()  # TRL subtracts in place
    contain_eos_token = torch.any(postprocessed_responses == eos_token_id, dim=-1)
    if missing_eos_penalty is not None:
        scores[~contain_eos_token] -= missing_eos_penalty
    return scores


def token_rewards(
    scores, logprobs, ref_logprobs, sequence_lengths, padding_mask, kl_coef, kl_estimator="k1"
):
    logprobs = torch.masked_fill(logprobs, padding_mask, INVALID_LOGPROB)
    ref_logprobs = torch.masked_fill(ref_logprobs, padding_mask, INVALID_LOGPROB)
    sequence_lengths_p1 = sequence_lengths + 1
    # 4. compute rewards
    # Formula used by http://joschu.net/blog/kl-approx.html for the k1 and k3 estimators
    logr = ref_logprobs - logprobs
    kl = -logr if kl_estimator == "k1" else (logr.exp() - 1) - logr  # Else statement is k3
    non_score_reward = -kl_coef * kl
    rewards = non_score_reward.clone()
    actual_start = torch.arange(rewards.size(0), device=rewards.device)
    fits = sequence_lengths_p1 < rewards.size(1)
    actual_end = torch.where(fits, sequence_lengths_p1, sequence_lengths)
    rewards[actual_start, actual_end] += scores
    mean_kl = kl.sum(1).mean()
    return rewards, kl, mean_kl


def whitened_rewards(rewards, padding_mask_p1):
    # 5. whiten rewards
    rewards = masked_whiten(rewards, mask=~padding_mask_p1, shift_mean=False)
    rewards = torch.masked_fill(rewards, padding_mask_p1, 0)
    return rewards


def gae(rewards, values, padding_mask_p1, gamma, lam):
    values = torch.masked_fill(values, padding_mask_p1, 0)
    # 6. compute advantages and returns
    lastgaelam = 0
    advantages_reversed = []
    gen_length = rewards.shape[1]
    for t in reversed(range(gen_length)):
        nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    advantages = torch.stack(advantages_reversed[::-1], axis=1)
    returns = advantages + values
    return advantages, returns


def whitened_advantages(advantages, padding_mask):
    advantages = masked_whiten(advantages, ~padding_mask)
    advantages = torch.masked_fill(advantages, padding_mask, 0)
    return advantages


def value_loss(vpred, mb_values, mb_return, padding_mask_p1, cliprange_value):
    mb_values = torch.masked_fill(mb_values, padding_mask_p1, 0)
    vpred = torch.masked_fill(vpred, padding_mask_p1, 0)
    vpredclipped = torch.clamp(
        vpred,
        mb_values - cliprange_value,
        mb_values + cliprange_value,
    )
    vf_losses1 = torch.square(vpred - mb_return)
    vf_losses2 = torch.square(vpredclipped - mb_return)
    vf_loss_max = torch.max(vf_losses1, vf_losses2)
    vf_loss = 0.5 * masked_mean(vf_loss_max, ~padding_mask_p1)
    vf_clipfrac = masked_mean(
        (vf_losses2 > vf_losses1).float(), ~padding_mask_p1
    )
    return vf_loss, vf_clipfrac


def policy_loss(new_logprobs, mb_logprobs, mb_advantage, padding_mask, cliprange):
    """pg_loss, pg_clipfrac, approxkl, ratio."""
    mb_logprobs = torch.masked_fill(mb_logprobs, padding_mask, INVALID_LOGPROB)
    new_logprobs = torch.masked_fill(
        new_logprobs, padding_mask, INVALID_LOGPROB
    )
    logprobs_diff = new_logprobs - mb_logprobs
    ratio = torch.exp(logprobs_diff)
    pg_losses = -mb_advantage * ratio
    pg_losses2 = -mb_advantage * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    pg_loss_max = torch.max(pg_losses, pg_losses2)
    pg_loss = masked_mean(pg_loss_max, ~padding_mask)
    pg_clipfrac = masked_mean(
        (pg_losses2 > pg_losses).float(), ~padding_mask
    )
    approxkl = 0.5 * (logprobs_diff**2).mean()
    return pg_loss, pg_clipfrac, approxkl, ratio.mean()


def entropy(logits):
    """At every place; what is logged is its mean()."""
    prob_dist = torch.nn.functional.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(prob_dist * logits, dim=-1)
    return entropy
