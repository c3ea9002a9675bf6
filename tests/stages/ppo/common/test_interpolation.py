"""Policies between the reference and a trained policy."""

import copy

import pytest
import torch

from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.saving import trainable_state_dict
from stages.ppo.common.interpolation import MAX_SCALE, interpolate, scale_for_kl


def whole_weights(policy) -> dict[str, torch.Tensor]:
    """The weights that the policy computes with: peft merges an adapter into them."""
    plain = copy.deepcopy(policy)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    return plain.state_dict()


@pytest.mark.parametrize("r", [4, 0], ids=["adapters", "all weights"])
@pytest.mark.parametrize("scale", [0.0, 0.4, 1.0, 1.2])
def test_all_weights_are_on_the_line_from_the_reference_to_the_trained_policy(
    make_roles, shift, r, scale
):
    roles = make_roles(lora=LoraParams(r=r))
    start = whole_weights(roles.policy)
    shift(roles.policy, 0.1)
    end = whole_weights(roles.policy)
    trained = {n: w.clone() for n, w in trainable_state_dict(roles.policy).items()}
    shift(roles.policy, 0.1)  # whatever the policy is now
    interpolate(roles.policy, roles.reference, trained, scale)
    between = whole_weights(roles.policy)
    assert between.keys() == start.keys()
    for name, weight in between.items():
        expected = start[name] + scale * (end[name] - start[name])
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    with roles.reference() as model:  # it has not moved
        reference = {name: weight.clone() for name, weight in model.state_dict().items()}
    plain = {name: weight for name, weight in reference.items() if "lora_" not in name}
    for name, weight in plain.items():
        short = name.replace("base_model.model.", "").replace(".base_layer", "")
        assert torch.equal(weight, start[short])


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
