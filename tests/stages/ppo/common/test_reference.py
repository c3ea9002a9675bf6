"""A trained model and its reference, on architectures that can and cannot start from states."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.packing import hidden_states, pack, unwrap_peft
from stages.lib.lm.shared_layers import forward_layers
from stages.ppo.common.reference import reference_view
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.lib.lm.shapes import (
    ALL_SHAPES,
    POSITIONS_ADDED,
    PROMPTS,
    RESPONSES,
    build,
    with_adapters,
)
from tests.stages.ppo.conftest import ByteTokenizer

PACKED = pack(PROMPTS, RESPONSES, torch.device("cpu"))
PPO = PpoParams(
    batch_size=8, mini_batch_size=8, micro_batch_size=4, response_length=6, total_episodes=16
)


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("top_layers", [1, None])
def test_trained_states_are_those_of_the_whole_model(shape: str, top_layers: int | None) -> None:
    model = with_adapters(build(ALL_SHAPES[shape]), top_layers)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    view = reference_view(model)
    first = view.first_trained_layer
    assert first == (None if shape in POSITIONS_ADDED else 2 if top_layers else 0)
    with torch.no_grad(), view.reference() as reference:
        _, kept = forward_layers(reference, PACKED, keep=[] if first is None else [first])
    states = view.trained_states(PACKED, kept[0] if kept else torch.empty(len(PACKED.input_ids), 0))
    whole = hidden_states(model, PACKED)
    torch.testing.assert_close(states, whole)
    gradients = [torch.autograd.grad(x.square().sum(), weights) for x in (states, whole)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def make_roles(config: PreTrainedConfig, lora: LoraParams) -> Roles:
    torch.manual_seed(1)
    config = copy.deepcopy(config)
    config.num_labels = 1
    reward: Any = AutoModelForSequenceClassification.from_config(
        config, attn_implementation="grouped"
    ).eval()
    reward.config.mean, reward.config.std = 0.0, 1.0
    return Roles(
        policy=add_adapters(build(config), lora, "CAUSAL_LM").eval(),
        critic=add_adapters(reward, lora, "SEQ_CLS").eval(),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("shape", POSITIONS_ADDED)
@pytest.mark.parametrize("lora", [LoraParams(r=2, top_layers=1), LoraParams(r=0)])
def test_updates_of_models_that_add_positions(shape: str, lora: LoraParams) -> None:
    """The trainer itself checks that ratio and KL are 1 and 0 before the first update."""
    roles = make_roles(POSITIONS_ADDED[shape], lora)
    reward_model = copy.deepcopy(unwrap_peft(roles.critic))
    rows: Any = [{"id": str(i), "prompt": str(i)} for i in range(8)]
    prompts = [(row, [5 + i, 6, 7][: 1 + i % 3]) for i, row in enumerate(rows)]
    trainer = PpoTrainer(roles, prompts, PPO, seed=0)
    first, _ = trainer.step()
    expected = [
        reward_model(torch.tensor([prompt + EndTokens(2).close(response)])).logits.item()
        for prompt, response in zip(first.prompts, first.responses, strict=True)
    ]
    assert first.raw_scores.tolist() == pytest.approx(expected, abs=1e-4)
    _, metrics = trainer.step()
    assert metrics["kl"] > 1e-3  # the first update has moved the policy
