"""Shared layers run once: against forward passes of each whole model."""

import copy

import pytest
import torch
from transformers import Gemma3TextConfig

from stages.lib.lm.packing import (
    forward_layers,
    hidden_states,
    num_layers_below_adapters,
    num_shared_layers,
    pack,
)
from tests.stages.lib.lm.shapes import (
    POSITIONS_ADDED,
    PROMPTS,
    RESPONSES,
    SHAPES,
    SIZES,
    build,
    with_adapters,
)

CPU = torch.device("cpu")
PACKED = pack(PROMPTS[:3], RESPONSES[:3], CPU)
KINDS = SHAPES | {
    "gemma3": Gemma3TextConfig(  # layers of two kinds, chosen by their number
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        rope_local_base_freq=10.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("attention", ["grouped", "eager"])
def test_upper_layers_on_shared_states_equal_the_whole_model(shape, attention):
    plain, model = (
        build(KINDS[shape], attention),
        with_adapters(build(KINDS[shape], attention), top_layers=1),
    )
    assert num_shared_layers(plain, model) == num_layers_below_adapters(model) == 2
    with torch.no_grad():
        whole, [lower, upper] = forward_layers(plain, PACKED, keep=[1, 2])
        torch.testing.assert_close(whole, hidden_states(build(KINDS[shape], "eager"), PACKED))
        torch.testing.assert_close(
            forward_layers(model, PACKED, upper, 2)[0], hidden_states(model, PACKED)
        )
        states, [again] = forward_layers(
            model, PACKED, lower, 1, keep=[2]
        )  # and starting one layer lower
        torch.testing.assert_close(states, hidden_states(model, PACKED))
        torch.testing.assert_close(again, upper)
        assert not torch.allclose(whole, states, atol=1e-2)


def test_one_different_weight_ends_the_shared_layers():
    model = build(SHAPES["llama"])
    other = copy.deepcopy(model)
    assert num_shared_layers(model, other) == 2  # the last is never shared
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert num_shared_layers(model, other) == num_shared_layers(model, model, other) == 1
    other.model.embed_tokens.weight.data[7, 0] += 1e-3
    assert num_shared_layers(model, other) == 0


@pytest.mark.parametrize("shape", POSITIONS_ADDED)
def test_nothing_is_shared_if_positions_would_be_added_twice(shape):
    model = build(POSITIONS_ADDED[shape], "eager")
    assert num_layers_below_adapters(model) == 3
    assert num_shared_layers(model, copy.deepcopy(model)) == 0


def test_nothing_is_shared_if_embeddings_have_another_width_than_states():
    """As in OPT-350m."""
    config = copy.deepcopy(POSITIONS_ADDED["opt"])
    config.word_embed_proj_dim = 16
    model = build(config, "eager")
    assert num_shared_layers(model, copy.deepcopy(model)) == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shape", KINDS)
def test_checkpointed_layers_keep_less_and_have_the_same_gradients(shape, first):
    model = with_adapters(build(KINDS[shape]), top_layers=2)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with torch.no_grad():
        _, [entering] = forward_layers(model, PACKED, keep=[first])
    kept, gradients = [], []
    for checkpointed in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor.numel()) or tensor,
            lambda tensor: tensor,
        ):
            states, _ = forward_layers(
                model, PACKED, entering, first, gradient_checkpointing=checkpointed
            )
        kept.append(sum(saved))
        gradients.append(torch.autograd.grad(states.square().sum(), weights))
    assert kept[1] < kept[0] / 4
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)
