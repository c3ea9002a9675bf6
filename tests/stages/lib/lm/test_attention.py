"""`grouped` attention against transformers' `eager`, with grouped heads, padding and a cache, with
the softcap of Gemma 2 and the sinks of gpt-oss.
"""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

import stages.lib.lm.attention  # noqa: F401 - registers `grouped`

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(
    params=[
        LlamaConfig(**SIZES),
        Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=1e-3),
        GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def models(request):
    torch.manual_seed(0)
    eager, grouped = (
        AutoModelForCausalLM.from_config(
            deepcopy(request.param),  # it keeps the name of the attention
            attn_implementation=attention,
        ).eval()
        for attention in ("eager", "grouped")
    )
    grouped.load_state_dict(eager.state_dict())
    return eager, grouped


@pytest.mark.parametrize("padding", [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
def test_logits_and_gradients_are_those_of_eager(models, padding):
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1] * 6, padding])
    logits = [model(input_ids=ids, attention_mask=mask).logits for model in models]
    for model_logits in logits:
        model_logits[mask.bool()].square().sum().backward()
    torch.testing.assert_close(logits[1][mask.bool()], logits[0][mask.bool()])
    for grouped, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(grouped.grad, eager.grad)


def test_a_step_with_a_cache_equals_a_forward_pass_of_the_whole_row(models):
    _, model = models
    ids = torch.arange(8)[None]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :7], use_cache=True).past_key_values
        step = model(input_ids=ids[:, 7:], past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(step, model(input_ids=ids).logits[0, -1])
