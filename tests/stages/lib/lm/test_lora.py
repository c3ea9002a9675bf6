"""The fused layer against peft's own: forward, backward, merged, switched off, saved and loaded."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from docs.bench.families import random_model
from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.lm.loading import load_causal_lm
from stages.lib.lm.lora import (
    FusedLinear,
    adapter_disabled,
    add_adapters,
    cached_adapter_weights,
    load_adapters,
)

IDS = torch.arange(3, 15).view(2, 6)


@pytest.fixture
def both(tiny_lm):
    """The same model with the same random adapters, on fused layers and on peft's."""
    fused_model = add_adapters(tiny_lm(), LoraParams(r=4, lora_alpha=12, top_layers=1), "CAUSAL_LM")
    for name, weight in fused_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    targets = sorted(
        {
            name.split(".")[-1]
            for name, module in fused_model.named_modules()
            if isinstance(module, FusedLinear)
        }
    )
    peft_model = get_peft_model(
        tiny_lm(),
        LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules=targets,
            layers_to_transform=[1],
            task_type="CAUSAL_LM",
        ),
    )
    peft_model.load_state_dict(fused_model.state_dict())
    assert (
        not any(isinstance(module, FusedLinear) for module in peft_model.modules())
        and len(targets) == 7
    )
    return fused_model, peft_model


def test_outputs_and_gradients_are_pefts(both):
    for model in both:
        model(IDS).logits.pow(3).sum().backward()
    torch.testing.assert_close(both[0](IDS).logits, both[1](IDS).logits)
    trained = [[w for w in model.parameters() if w.requires_grad] for model in both]
    assert len(trained[0]) == 14
    for fused_weight, peft_weight in zip(*trained, strict=True):
        torch.testing.assert_close(fused_weight.grad, peft_weight.grad, rtol=1e-3, atol=1e-3)
    assert all(weight.grad is None for weight in both[0].parameters() if not weight.requires_grad)


def test_an_output_may_be_changed_in_place(both):
    """As Falcon's layers do."""
    [layer] = [module for name, module in both[0].named_modules() if name.endswith("1.mlp.up_proj")]
    tokens = torch.ones(2, 3, layer.in_features)
    (gradient,) = torch.autograd.grad(layer(tokens).pow(2).sum(), layer.lora_A["default"].weight)
    output = layer(tokens)
    output *= 1.0
    (in_place,) = torch.autograd.grad(output.pow(2).sum(), layer.lora_A["default"].weight)
    torch.testing.assert_close(in_place, gradient)


def test_a_module_whose_kernels_read_its_weights_has_no_adapter(tmp_path):
    """peft refuses it: an adapter of it would not change what a GPU computes."""
    falcon = load_causal_lm(random_model("falcon_h1", tmp_path), ModelParams(dtype="float32"))
    for top_layers in (1, None):
        model = add_adapters(falcon, LoraParams(r=4, top_layers=top_layers), "CAUSAL_LM")
        adapted = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, FusedLinear)
        }
        assert "in_proj" in adapted and "out_proj" not in adapted
        model.unload()
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):  # not left out in silence
        add_adapters(falcon, LoraParams(r=4, target_modules=["in_proj", "out_proj"]), "CAUSAL_LM")


def test_cached_adapters_are_bit_identical_and_released_at_the_end(both):
    model = both[0]
    with torch.no_grad():
        expected = model(IDS).logits
        with adapter_disabled(model):
            bare = model(IDS).logits
            with cached_adapter_weights(model):  # the reference stays the reference
                assert torch.equal(model(IDS).logits, bare)
        with pytest.raises(KeyboardInterrupt), cached_adapter_weights(model):
            assert torch.equal(model(IDS).logits, expected)
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.zero_()
            assert torch.equal(model(IDS).logits, expected)
            raise KeyboardInterrupt
        assert torch.equal(model(IDS).logits, bare)
    model(IDS).logits.sum().backward()  # and it can still be trained
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_bias_of_the_layer_below_is_added():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 3))
    models = [copy.deepcopy(plain) for _ in range(2)]
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    fused = copy.deepcopy(config)
    fused._register_custom_module({torch.nn.Linear: FusedLinear})
    fused_model, peft_model = (
        get_peft_model(model, lora_config)
        for model, lora_config in zip(models, (fused, config), strict=True)
    )
    fused_model.load_state_dict(peft_model.state_dict())
    x = torch.randn(4, 5)
    torch.testing.assert_close(fused_model(x), peft_model(x))


def test_bfloat16_under_autocast_is_as_near_to_float64_as_pefts(both):
    exact = copy.deepcopy(both[1]).double()(IDS).logits
    errors = []
    for model in both:
        for name, weight in model.named_parameters():
            if "lora" not in name:
                weight.data = weight.data.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            errors.append((model(IDS).logits.double() - exact).abs().mean().item())
    assert errors[0] < 1.2 * errors[1]


def test_off_merged_and_reloaded_it_equals_peft(both, tiny_lm, tmp_path):
    fused_model, peft_model = both
    with torch.no_grad():
        with adapter_disabled(fused_model) as plain:
            torch.testing.assert_close(plain(IDS).logits, tiny_lm()(IDS).logits)
        fused_model.save_pretrained(tmp_path)
        expected = peft_model(IDS).logits
        for loaded in (
            load_adapters(tiny_lm(), tmp_path),
            PeftModel.from_pretrained(tiny_lm(), tmp_path),
        ):
            torch.testing.assert_close(loaded(IDS).logits, expected)
        torch.testing.assert_close(fused_model.merge_and_unload()(IDS).logits, expected)
