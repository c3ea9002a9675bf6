"""Layers that models have in common run once: against each model as a whole."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, Qwen2Config

import stages.attention  # noqa: F401 - registers `grouped`
from stages.layers import common_layers, plain_layers, through
from stages.lora import add_adapters
from stages.packing import hidden_states, pack
from stages.params import LoraParams

CPU = torch.device("cpu")
PACKED = pack([[5, 6, 7], [8], [9, 10, 11, 12, 13]], [[20, 21, 2], [22, 23, 24, 25], [26]], CPU)
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.2}
SHAPES = {
    "llama": LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, intermediate_size=48, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=48),
    "gemma3": Gemma3TextConfig(  # layers of two kinds, told apart by their number
        **SIZES,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        rope_local_base_freq=10.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}


def build(config, attention: str = "grouped"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_adapters(model, top_layers: int):
    model = add_adapters(model, LoraParams(r=2, top_layers=top_layers), "CAUSAL_LM")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["grouped", "eager"])
def test_upper_layers_on_handed_on_states_are_the_whole_model(shape, attention):
    plain, model = build(SHAPES[shape], attention), with_adapters(build(SHAPES[shape], attention), top_layers=1)
    assert common_layers(plain, model) == plain_layers(model) == 2
    with torch.no_grad():
        whole, [lower, upper] = through(plain, PACKED, keep=[1, 2])
        torch.testing.assert_close(whole, hidden_states(build(SHAPES[shape], "eager"), PACKED))
        torch.testing.assert_close(through(model, PACKED, upper, 2)[0], hidden_states(model, PACKED))
        states, [again] = through(model, PACKED, lower, 1, keep=[2])  # and from further below
        torch.testing.assert_close(states, hidden_states(model, PACKED))
        torch.testing.assert_close(again, upper)
        assert not torch.allclose(whole, states, atol=1e-2)


def test_one_other_weight_ends_what_is_common():
    model = build(SHAPES["llama"])
    other = copy.deepcopy(model)
    assert common_layers(model, other) == 2  # the last is never shared
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert common_layers(model, other) == common_layers(model, model, other) == 1
    other.model.embed_tokens.weight.data[7, 0] += 1e-3
    assert common_layers(model, other) == 0


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=40, n_embd=32, n_layer=3, n_head=4, initializer_range=0.2),
        OPTConfig(
            vocab_size=40, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32, init_std=0.2
        ),
    ],
)
def test_states_are_not_handed_on_where_positions_would_be_added_twice(config):
    model = build(config, "eager")
    assert plain_layers(model) == 3
    assert common_layers(model, copy.deepcopy(model)) == 0
