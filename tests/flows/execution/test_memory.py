"""Sizes of a model, of its roles and of what training keeps, worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.execution import memory
from flows.execution.memory import Need, activations, engine_need, gpu_needs, kept_per_token
from flows.execution.model_shape import KNOWN, NAMED_SIZES, ModelShape, read_shape, shape_of
from stages.lib.core.errors import BadInput, OutOfMemory
from stages.lib.core.params import Params
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.generation import GPU_CACHE_SHARE
from tests.engine_settings import NEEDED

# 2 heads of 4 for queries, 1 for keys and values; MLP of three 8 x 16 matrices; 10 tokens
SMALL = ModelShape(hidden=8, layers=3, heads=2, key_heads=1, head_size=4, inner=16, vocabulary=10)
LAYER = 2 * 64 + 2 * 32 + 3 * 128
WEIGHTS = 3 * LAYER + 80
LORA, FULL = LoraParams(r=2), LoraParams(r=0)
ALL_WEIGHTS = {"lora": {"r": 0}, "critic_lora": {"r": 0}}


def stage_weights(**sections: Any) -> dict[str, tuple[float, float]]:
    """Models of each stage, and trained ones."""
    sections = {"evaluate": {"judges": ["lexicon"]}} | sections
    roles = memory.stage_roles(Params.model_validate(sections), SMALL)
    return {
        stage: (
            sum(role.weights for role in roles[stage]) / WEIGHTS,
            sum(role.trained for role in roles[stage]) / WEIGHTS,
        )
        for stage in roles
    }


def test_weights_are_those_of_the_matrices() -> None:
    """Queries and output 8 x 8, keys and values 8 x 4, MLP 3 x 8 x 16; embeddings 10 x 8. Adapters:
    inputs + outputs of a layer are 16, 12, 12, 16, and 24 three times: 128."""
    assert SMALL.weights == WEIGHTS
    assert SMALL.adapter_weights(LORA) == 2 * 3 * 128
    assert SMALL.adapter_weights(LoraParams(r=2, top_layers=1)) == 2 * 128
    # what the model cards report
    assert round(KNOWN["embedded"].weights / 1e6) == 134
    assert round(NAMED_SIZES["0.5b"].weights / 1e6) == 494


def test_each_stage_has_the_models_of_its_roles() -> None:
    """PPO of all weights: policy, reference, critic and reward model; of adapters, policy and
    reward model are also reference and critic."""
    both = {"sft": {"lora": {"r": 0}}, "reward": {"lora": {"r": 0}}, "ppo": ALL_WEIGHTS}
    full = stage_weights(**both)
    assert full["sft"] == full["reward"] == (1, 1)
    assert full["ppo"] == (4, 2)
    assert full["battery"] == (2, 0)
    assert full["evaluate"] == (6, 0)  # base, SFT, first SFT, policy and its SFT, reward model
    assert full["capability"] == (3, 0)
    assert "annotate" not in full
    adapters = stage_weights()
    assert adapters["ppo"][0] == 2 and adapters["evaluate"][0] == 5
    assert stage_weights(rounds={"r0": {"previous": "assets/start"}})["evaluate"][0] == 4
    assert stage_weights(algorithm="dpo", **both)["ppo"] == (3, 1)
    assert stage_weights(annotate={"annotator": "judge"})["annotate"] == (1, 0)


def test_further_models_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    more = stage_weights(
        reward={"ensemble": 3, "judge_share": 0.5},
        evaluate={"judges": ["zero_shot", "fluency", "apart", str(tmp_path)]},
    )
    assert more["reward"][0] == 4  # the last member, two before it, and the held-out one
    assert more["battery"][0] == 1 + 3 + 1 + 1
    assert more["evaluate"][0] == 3 + 1 + 3 + 3
    rewards = [{"name": "second", "model": str(tmp_path), "weight": 0.5}]
    assert stage_weights(ppo={"rewards": rewards})["ppo"][0] == 3


def test_processes_that_divide_layers_hold_half_of_them() -> None:
    launcher = {"processes": 2, "shard": True}
    share = 1 - 3 * LAYER / 2 / WEIGHTS
    models, trained = stage_weights(ppo=ALL_WEIGHTS, launcher=launcher)["ppo"]
    assert (models, trained) == pytest.approx((4 * share, 2 * share))


def test_a_stage_whose_weights_do_not_fit_is_refused() -> None:
    """SFT of all weights: 2 + 16 bytes each; in RAM, two processes have them twice."""
    sections = {"sft": {"lora": {"r": 0}}, "launcher": {"processes": 2}}
    params, one = Params.model_validate(sections), 18.0 * WEIGHTS
    for total, gpu in ((one, True), (2 * one, False)):
        assert memory.check(params, ["prepare", "sft"], SMALL, total, gpu) == {"sft": total}
        with pytest.raises(
            OutOfMemory, match=r"sft needs .* alone \(SFT model .* choose a smaller"
        ):
            memory.check(params, ["sft"], SMALL, total - 1, gpu)
    float32 = Params.model_validate({"model": {"dtype": "float32"}, "sft": sections["sft"]})
    assert memory.check(float32, ["sft"], SMALL, 1e9, True) == {"sft": 20 * WEIGHTS}


def test_the_backward_pass_reads_norms_attention_and_mlp() -> None:
    """Per token: two norms of 8, in float32 and bfloat16; queries of 8, keys and values of 4,
    twice, and the result of 8; four states of 16."""
    per_token = 2 * 8 * (4 + 2) + 2 * (2 * (8 + 4 + 4) + 8) + 4 * 16 * 2
    assert kept_per_token(SMALL, 2, full=False) == per_token
    top = LoraParams(r=2, top_layers=2)
    assert activations(SMALL, 10, 2, LORA, False) == (3 + 1) * 10 * per_token
    assert activations(SMALL, 10, 2, top, False) == (2 + 1) * 10 * per_token
    assert activations(SMALL, 10, 2, LORA, True) == 10 * (3 * 8 * 2 + 2 * per_token)


def test_a_gpu_has_weights_states_and_the_largest_pass() -> None:
    sections = {"sft": {"per_device_train_batch_size": 4, "max_length": 10}, "reward": {}}
    needed = gpu_needs(Params.model_validate(sections), SMALL, 1e3, 1)
    adapters = 16 * 16 * 3 * 128  # rank 16, 16 bytes
    assert needed["sft"] == Need(2 * WEIGHTS, adapters, activations(SMALL, 40, 2, LORA, False))
    assert gpu_needs(Params.model_validate(sections), SMALL, 1e9, 1)["sft"].peak == 0.25e9
    assert needed["battery"] == Need(4 * WEIGHTS, 0, 250)


def test_an_engine_divides_what_is_trained_among_all_gpus() -> None:
    """4 episodes of 50 tokens: logits of 10 bytes, one layer and the next one gathered."""
    sections = {"prepare": {"max_prompt_tokens": 30}, "launcher": {"ray_address": "http://a:1"}}
    ppo = NEEDED | {"response_length": 20, "batch_size": 32, "mini_batch_size": 32}
    params = Params.model_validate(sections | {"ppo": ppo | {"micro_batch_size": 4}})
    states, step = 16 * WEIGHTS / 8, activations(SMALL, 200, 2, FULL, False)
    gathered = 2 * 2 * LAYER
    expected = Need(0, states, gathered + step + 200 * 10 * 10)
    assert engine_need(params, SMALL, 8, 4) == expected
    assert gpu_needs(params, SMALL, 1e9, 8)["ppo by openrlhf"] == expected


SMALL_CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_shapes_are_read_from_configs_of_any_age(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert shape_of(gpt2, "") == ModelShape(768, 12, 12, 12, 64, 3072, 50257, gated=False)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": gpt2}))
    assert read_shape(str(tmp_path)) == shape_of(gpt2, "")
    # GPT-Neo and MPT have further names; Gemma 3n has a size per layer
    gpt_neo = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 435}
    mpt = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 435}
    shape = ModelShape(64, 2, 4, 4, 16, 256, 435)
    assert shape_of(gpt_neo, "") == shape_of(mpt, "") == shape
    assert shape_of(gpt_neo | {"intermediate_size": [96, 256]}, "") == shape
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"config\.json has no hidden_size, num_hidden_layers"):
        read_shape(str(tmp_path))


def test_a_model_of_the_hub_that_cannot_be_reached_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_shape("nobody/nothing@main") is None


def test_the_cache_of_sampling_is_the_one_that_sampling_has() -> None:
    assert memory.CACHE == GPU_CACHE_SHARE
