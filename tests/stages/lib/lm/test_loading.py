"""Models whose logits are more than states times head are refused."""

import pytest
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from stages.lib.core.errors import BadInput
from stages.lib.core.params.shared import ModelParams
from stages.lib.lm.loading import load_causal_lm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Gemma2Config(**SIZES, num_key_value_heads=2), "final_logit_softcapping"),
        (GraniteConfig(**SIZES, logits_scaling=8.0), "logits_scaling"),
    ],
)
def test_logits_that_are_more_than_a_product_are_refused(tmp_path, config, key):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=rf"config\.json's {key} changes the logits"):
        load_causal_lm(tmp_path, ModelParams(dtype="float32"))


def test_logits_scaled_by_one_are_accepted(tmp_path):
    AutoModelForCausalLM.from_config(GraniteConfig(**SIZES)).save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path, ModelParams(dtype="float32")).config.logits_scaling == 1.0
