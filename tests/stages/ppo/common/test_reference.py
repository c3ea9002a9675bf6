"""A trained model and its reference, on architectures that can and cannot start from states."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params import check_params
from stages.lib.core.params.policy import OnDanger, PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.packing import forward_layers, hidden_states, pack, unwrap_peft
from stages.lib.lm.saving import saved_weights_hash, weights_hash
from stages.ppo.__main__ import main as ppo
from stages.ppo.common.reference import (
    ReferenceView,
    check_reference_files,
    check_reference_weights,
)
from stages.ppo.trainer.loop import TrainingRun
from stages.ppo.trainer.roles import Roles, load_roles
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
    view = ReferenceView(model)
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
        reward_model(
            torch.tensor([response.prompt_ids + EndTokens(2).close(response.tokens)])
        ).logits.item()
        for response in first.responses
    ]
    assert first.raw_scores.tolist() == pytest.approx(expected, abs=1e-4)
    _, metrics = trainer.step()
    assert metrics["kl"] > 1e-3  # the first update has moved the policy


def test_adapters_do_not_change_the_hash_of_the_weights_below_them() -> None:
    plain, adapted = build(ALL_SHAPES["llama"]), with_adapters(build(ALL_SHAPES["llama"]))
    expected = weights_hash(plain)
    assert weights_hash(adapted) == expected
    check_reference_weights(adapted, expected, "now")
    weight = adapted.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
    weight.data[0, 0] += 1e-3
    actual = weights_hash(adapted)
    with pytest.raises(RondoError, match=f"now, .* sha256 {actual}, .* started with {expected}"):
        check_reference_weights(adapted, expected, "now")
    assert weights_hash(plain.to(torch.bfloat16)) != expected


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_another_model_than_that_of_sft_is_refused_at_the_start(
    make_round: Any, algorithm: str
) -> None:
    params = make_round("r0", 1.0).model_dump()
    params = check_params(params | {"algorithm": algorithm}, "test")
    sft = Path("rounds/r0/sft")
    expected = saved_weights_hash(sft / "model")
    check_reference_files(sft)
    weights = load_file(sft / "model/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, sft / "model/model.safetensors", {"format": "pt"})
    actual = saved_weights_hash(sft / "model")
    with pytest.raises(BadInput, match=f"sha256 {actual}, .* records {expected}.*sft@r0"):
        ppo(params, "r0")


@pytest.mark.parametrize("lora", [LoraParams(r=2), LoraParams(r=0)])
def test_another_reference_is_refused_at_resume_and_at_the_end(
    lora: LoraParams, make_round: Any
) -> None:
    params = make_round("r0", 1.0)
    sizes = {"batch_size": 2, "mini_batch_size": 2, "micro_batch_size": 2, "total_episodes": 4}
    params.ppo = params.ppo.model_copy(update=sizes | {"lora": lora, "on_danger": OnDanger.warn})
    rows: Any = [{"id": str(i), "prompt": f"The {i}"} for i in range(4)]
    prompts = [(row, [5, 6, 7 + i]) for i, row in enumerate(rows)]
    sft, reward = Path("rounds/r0/sft/model"), Path("rounds/r0/reward/model")

    def start() -> TrainingRun:
        trainer = PpoTrainer(load_roles(params, sft, reward), prompts, params.ppo, 0)
        return TrainingRun(trainer, prompts[:1], params, "r0", {})

    def change_reference(run: TrainingRun) -> None:
        with run.trainer.roles.reference() as reference, torch.no_grad():
            next(p for p in reference.parameters() if not p.requires_grad).add_(1)

    run = start()
    run.train()
    assert run.resume.load()["reference"] == run.reference  # type: ignore[index]
    assert start().trainer.updates == 2
    change_reference(run)
    with pytest.raises(RondoError, match="after the last update, the weights of the reference"):
        run.train()
    weights = load_file(sft / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, sft / "model.safetensors", {"format": "pt"})
    with pytest.raises(RondoError, match=f"after the resume.*started with {run.reference}"):
        start()
