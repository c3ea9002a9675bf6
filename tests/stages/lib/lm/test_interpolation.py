"""Policies between the reference and a trained policy."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from stages.lib.lm.interpolation import (
    MAX_SCALE,
    MAX_SCALED,
    interpolate,
    scale_for_kl,
    search_scale,
)
from stages.lib.lm.saving import policy_weights


def whole_weights(policy) -> dict[str, torch.Tensor]:
    """The weights that the policy computes with: peft merges an adapter into them."""
    plain = copy.deepcopy(policy)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    return plain.state_dict()


def shift(policy) -> None:
    """Move the adapter, or all weights."""
    for name, weight in policy.named_parameters():
        if "lora_" in name or not hasattr(policy, "peft_config"):
            weight.data += 0.1 * torch.randn_like(weight)


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "all weights"])
@pytest.mark.parametrize("scale", [0.0, 0.4, 1.0, 1.2])
def test_all_weights_are_on_the_line_from_the_reference_to_the_trained_policy(
    tiny_folder, adapters, scale
):
    torch.manual_seed(0)
    sft = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    start = copy.deepcopy(sft.state_dict())
    reference, policy = copy.deepcopy(sft), sft
    if adapters:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        policy = get_peft_model(sft, config)
    shift(policy)
    end, trained = whole_weights(policy), policy_weights(policy)
    shift(policy)  # whatever the policy is now
    policy.requires_grad_(False)  # as a policy that is only evaluated
    interpolate(policy, lambda: nullcontext(reference), trained, scale)
    between = whole_weights(policy)
    assert between.keys() == start.keys()
    for name, weight in between.items():
        expected = start[name] + scale * (end[name] - start[name])
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(weight, start[name]) for name, weight in reference.state_dict().items())


@pytest.mark.parametrize("exponent", [1.2, 1.7, 2.5])
@pytest.mark.parametrize("target", [0.5, 3.0, 7.9])
def test_the_search_ends_at_the_target_if_kl_is_a_power_of_the_scale(exponent, target):
    measured = search_scale(lambda scale: 8.0 * scale**exponent, (1.0, 8.0), target)
    assert measured[0] == (1.0, 8.0) and len(measured) <= 1 + MAX_SCALED
    assert measured[-1][1] == pytest.approx(target, rel=0.05)


def test_the_search_measures_nothing_if_the_kl_is_the_target():
    assert search_scale(lambda _: 0.0, (1.0, 8.0), 8.1) == [(1.0, 8.0)]


def test_a_policy_without_kl_is_scaled_up_once():
    assert search_scale(lambda _: 0.0, (1.0, 0.0), 1.0) == [(1.0, 0.0), (MAX_SCALE, 0.0)]


@pytest.mark.parametrize(
    ("measured", "scale"),
    [
        # twice the KL is 2 ** (1 / 1.7) times the scale, 1.503
        ([(1.0, 1.8)], 0.5 ** (1 / 1.7)),
        ([(0.5, 0.45)], 0.5 * 2 ** (1 / 1.7)),
        ([(1.0, 0.9)], 1.0),
        # both at the target but for the noise: the middle of 0.95 and 1.05 by their logarithms
        ([(1.0, 0.9 * 0.95**-1.7), (1.0, 0.9 * 1.05**-1.7)], (0.95 * 1.05) ** 0.5),
        # the first one is too far away to count
        ([(1.0, 9.0), (0.3, 0.9 * 1.02**1.7)], 0.3 / 1.02),
        # so near each other that their order is noise: no line through them
        ([(1.0, 0.9 * 0.99), (0.95, 0.9 * 1.1)], ((1 / 0.99) * (0.95**1.7 / 1.1)) ** (0.5 / 1.7)),
        ([(1.0, 0.9 * 1.1), (0.95, 0.9 * 0.8)], ((1 / 1.1) * (0.95**1.7 / 0.8)) ** (0.5 / 1.7)),
        # between two that are far apart, KL rises with scale ** 3
        ([(1.0, 3.6), (0.5, 0.45)], 0.5 * 2 ** (1 / 3)),
        ([(1.0, 3.6), (0.5, 0.45), (2.0, 3.7), (0.1, 0.4)], 0.5 * 2 ** (1 / 3)),
        # no policy is scaled up far
        ([(1.0, 0.1)], MAX_SCALE),
        ([(1.0, 1e-8)], MAX_SCALE),
    ],
)
def test_the_scale_is_estimated_from_the_policies_near_the_target(measured, scale):
    assert scale_for_kl(measured, 0.9) == pytest.approx(scale)
