"""Checks of a rollout and of an optimizer step: finite numbers, and equal models at the start."""

import torch
from torch import Tensor

from stages.lib.core.errors import BadInput, Diverged, RondoError
from stages.lib.core.params.policy import LossLevel, PpoParams
from stages.lib.core.progress import tracked
from stages.lib.lm import world
from stages.lib.lm.packing import Packed, unwrap_peft
from stages.lib.lm.sharding import in_step
from stages.ppo.common.health import Rounding
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.rollout import Rollout, concat_padded


def check_finite(tensors: dict[str, Tensor], update: int) -> None:
    """
    Args:
        tensors: of any shape, by name.
        update: the number of the current update, from 1.

    Raises:
        Diverged: names the tensors with NaN or infinite values, and the next step.
    """
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        fix = (
            "look at the reward model's scores (rounds/<round>/reward)"
            if "raw_scores" in bad
            else "lower ppo.learning_rate"
        )
        raise Diverged(
            f"update {update}: {', '.join(bad)} not finite; the step was not applied "
            f"and the last saved state is kept. Next: {fix}"
        )


def check_clip_range(params: PpoParams, rounding: Rounding) -> None:
    """
    Raises:
        BadInput: a clip range per sequence is below twice the ratios that rounding alone gives, so
            that chance would decide which sequences are clipped.
    """
    least = 2 * rounding.sequence_log_ratio
    if params.loss_level is LossLevel.sequence and params.cliprange_sequence < least:
        raise BadInput(
            f"ppo.cliprange_sequence {params.cliprange_sequence} with ppo.loss_level sequence: "
            f"rounding alone gives ratios up to {least:.2g} off 1, so it would clip at random. "
            "Next: set model.dtype to float32, ppo.loss_level to token, or ppo.cliprange_sequence "
            f"to {least:.2g} or more"
        )


def check_initial_ratio(
    roles: Roles, micro_batches: list[Packed], spare: Packed, rollout: Rollout, temperature: float
) -> None:
    """Before the first update, the policy on shared states and the policy run as a whole must
    agree; and so must policy and reference, unless the policy starts from other weights.

    Args:
        roles: the models.
        micro_batches: this process's episodes of the rollout.
        spare: any episode, for `in_step`.
        rollout: the first one.
        temperature: divides the logits.

    Raises:
        RondoError: they differ, because of dropout, a wrong mask, temperature or padding, or a
            model that cannot be split into layers. PPO would train on noise.
    """
    tolerance = 0.05 if unwrap_peft(roles.policy).dtype is torch.bfloat16 else 1e-3
    log_ratio_to_reference = (rollout.logprobs - rollout.ref_logprobs).abs().max()
    kl = float(log_ratio_to_reference) if roles.starts_as_reference else 0.0
    error = 0.0  # of a process whose episodes all failed
    batches = tracked("checking", micro_batches, len(micro_batches), "micro-batches")
    parts = [
        (roles.whole_logprobs(packed, temperature), is_own)
        for packed, is_own in in_step(roles.policy, batches, spare)
    ]
    if micro_batches:
        whole_logprobs = concat_padded([logprobs for logprobs, is_own in parts if is_own])
        width, own = whole_logprobs.shape[1], list(rollout.own)
        logprobs, mask = rollout.logprobs[own, :width], rollout.mask[own, :width]
        log_ratio = (whole_logprobs - logprobs)[mask]
        error = float((log_ratio.exp() - 1).abs().max())
    ratio_error = float(torch.tensor(world.gather([error])).max())  # NaN, if one is
    if not (kl <= tolerance and ratio_error <= tolerance):
        raise RondoError(
            "ppo: at update 1 the ratio must be 1 and the KL 0, but they are off by "
            f"{ratio_error:.3g} and {kl:.3g} nats (at most {tolerance}); look for dropout, a "
            "changed prompt template or padding"
        )
