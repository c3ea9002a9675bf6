"""Sizes of a model and of what training and sampling hold, worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.execution.memory import LIBRARIES, Limits, MemoryModel, stage_memory
from flows.execution.model_shape import KNOWN, ModelShape, read_shape, shape_of
from flows.execution.text_lengths import Batch, TextLengths, Texts, admitted, measured
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.core.params.shared import LoraParams

# 2 heads of 4 for queries, 1 for keys and values; MLP of three 8 x 16 matrices; 10 tokens
SMALL = ModelShape(hidden=8, layers=3, heads=2, key_heads=1, head_size=4, inner=16, vocabulary=10)
LIMITS = Limits(piece=50, cache=4096, tokens=64)
MODEL = MemoryModel(SMALL, 2, "cpu", "grouped", LIMITS)
FEW = {"batch_size": 2, "mini_batch_size": 2, "micro_batch_size": 2, "response_length": 4}
LORA, FULL = LoraParams(r=2), LoraParams(r=0)


def test_weights_are_those_of_the_matrices() -> None:
    """Queries and output 8 x 8, keys and values 8 x 4, MLP 3 x 8 x 16; embeddings 10 x 8."""
    layer = 2 * 64 + 2 * 32 + 3 * 128
    assert SMALL.weights == 3 * layer + 80
    assert MODEL.weights == 2 * (3 * layer + 80)
    # what the model cards report
    millions = {name: round(shape.weights / 1e6) for name, shape in KNOWN.items() if name != "tiny"}
    assert list(millions.values()) == [134, 362, 494, 405]


def test_adapters_have_rank_times_inputs_and_outputs() -> None:
    """Inputs + outputs of a layer: 16, 12, 12, 16, and 24 three times: 128; 16 bytes per weight."""
    assert SMALL.adapter_weights(LORA) == 2 * 3 * 128
    assert SMALL.adapter_weights(LoraParams(r=2, top_layers=1)) == 2 * 128
    assert MODEL.trained(LORA) == 16 * 2 * 3 * 128
    assert MODEL.trained(FULL) == 16 * SMALL.weights


def test_the_backward_pass_reads_norms_attention_and_mlp() -> None:
    """Per token: two norms of 8, in float32 and bfloat16; queries of 8, keys and values of 4,
    twice, and the result of 8; four states of 16."""
    per_token = 2 * 8 * (4 + 2) + 2 * (2 * (8 + 4 + 4) + 8) + 4 * 16 * 2
    assert MODEL.kept_per_token() == per_token
    batch = Batch(rows=2, tokens=10, longest=6)
    assert MODEL.kept(batch, LORA, False) == 3 * 10 * per_token
    assert MODEL.kept(batch, LoraParams(r=2, top_layers=2), False) == 2 * 10 * per_token
    assert MODEL.kept(batch, LORA, True) == 3 * 10 * 8 * 2
    padded = MemoryModel(SMALL, 2, "cpu", "sdpa", LIMITS)
    assert padded.kept(batch, LORA, False) == 3 * 12 * per_token
    # 2 rows, 2 heads, 6 x 6 weights: float32 and twice bfloat16
    eager = MemoryModel(SMALL, 2, "cpu", "eager", LIMITS)
    assert eager.kept(batch, LORA, False) == 3 * (12 * per_token + 2 * 2 * 36 * 8)


def test_logits_are_held_in_pieces() -> None:
    """3 tokens have 30 logits; 9 have 90, of which a piece has 50. Two pieces of bfloat16."""
    assert MODEL.logits(3) == 2 * 30 * 2
    assert MODEL.logits(9) == 2 * 50 * 2


def test_sampling_holds_keys_and_values() -> None:
    """A token has 2 x 3 layers x 4 numbers, 48 bytes; a row of 5 + 3 tokens 384: 10 rows fit in
    4096 bytes. Those of the prompts are there twice at first, with the states of a layer and
    attention weights of 2 heads x 5 x 5 x 8 bytes; a row of 5 + 60 tokens needs more later. Logits
    in bfloat16 and float32."""
    prefill = 5 * (2 * 48 + MODEL.kept_per_token()) + 2 * 25 * 8
    assert MODEL.sampling(4, 5, 3) == 4 * (prefill + 10 * 6)
    assert MODEL.sampling(99, 5, 3) == 10 * (prefill + 10 * 6)
    assert MODEL.sampling(4, 5, 60) == 65 * 48 + 10 * 6


def test_the_heap_keeps_half_of_what_other_passes_freed() -> None:
    """On a CPU; another device gives it back."""
    assert MODEL.by_turns(30, 10, 6) == 30 + (10 + 6) / 2
    assert replace(MODEL, device="cuda").by_turns(30, 10, 6) == 30


def test_scoring_fills_batches_by_tokens() -> None:
    """64 tokens are 8 texts of 8; the states and attention weights of one layer, which take 1.6
    times their size of the heap, and two pieces of logits."""
    layer = 64 * MODEL.kept_per_token() + 8 * 2 * 64 * 8
    assert MODEL.scoring(99, 8) == 1.6 * layer + 2 * 50 * 2


def test_the_longest_rows_that_fit_make_the_batch() -> None:
    pairs = Texts(((5, 9), (30, 4), (8, 8)), limit=20)
    assert pairs.longest(1) == Batch(2, 14, 9)
    assert pairs.longest(5) == Batch(4, 30, 9)
    assert Texts((), 20, 2).longest(3) == Batch(6, 120, 20)
    # mean 10, deviation 2: 4 rows have at most 10 + 2 x 2 / 2 = 12 tokens on average
    assert Texts(((8,), (12,)), 20).random(4, more=7) == Batch(4, 4 * 19, 19)


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
    named = "Qwen/Qwen2.5-0.5B-Instruct@7ae557604adf67be50417f59c2c2f167def9a775"
    assert read_shape(named) == KNOWN["Qwen/Qwen2.5-0.5B-Instruct"]


def test_a_model_of_the_hub_that_cannot_be_reached_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_shape("nobody/nothing@main") is None


def stages(**sections: Any) -> dict[str, float]:
    params = Params.model_validate({"assets": {"data": "files"}, **sections})
    model = MemoryModel(KNOWN["embedded"], 2, "cpu", "grouped", Limits(1 << 26, 1 << 29, 1 << 12))
    return stage_memory(params, admitted(params), model)


def test_memory_grows_with_texts_batches_models_and_full_training() -> None:
    base = stages()
    chat = {"max_length": 304, "per_device_train_batch_size": 16}
    for section in ("sft", "reward"):
        long = stages(**{section: chat})[section]
        assert long > base[section]
        assert long > stages(**{section: chat | {"gradient_checkpointing": True}})[section]
        assert long > stages(**{section: chat | {"per_device_train_batch_size": 4}})[section]
        assert stages(**{section: chat | {"lora": {"r": 0}}})[section] > long
    ensemble = stages(reward={"ensemble": 3})
    extra = 2 * 2 * 134_479_872  # two more models in bfloat16
    for stage in ("reward", "battery", "ppo", "evaluate", "replay"):
        assert ensemble[stage] - base[stage] == pytest.approx(extra)
    assert ensemble["sft"] == base["sft"]


def test_sft_has_the_heap_of_the_base_model_s_responses() -> None:
    """Its training needs most, and more with more responses sampled before."""
    few, many = (
        stages(sft={"max_length": 304}, prepare={"max_eval_prompts": prompts})["sft"]
        for prompts in (20, 80)
    )
    assert few < many


def test_processes_share_episodes_and_each_has_the_models() -> None:
    ppo = {"batch_size": 64, "mini_batch_size": 32, "micro_batch_size": 8}
    one, two = (stages(ppo=ppo, launcher={"processes": n})["ppo"] for n in (1, 2))
    half = stages(ppo=ppo | {"batch_size": 32})["ppo"]
    assert half < one < two == pytest.approx(2 * half)
    batches = {name: {"per_device_train_batch_size": 8} for name in ("sft", "reward", "dpo")}
    halves = {name: {"per_device_train_batch_size": 4} for name in batches}
    one = stages(algorithm="dpo", **halves)
    two_of_dpo = stages(algorithm="dpo", launcher={"processes": 2}, **batches)
    for stage in ("sft", "reward", "battery", "ppo", "evaluate", "replay"):
        assert two_of_dpo[stage] == pytest.approx(2 * one[stage])


def test_processes_that_divide_layers_hold_half_of_them() -> None:
    """Half of the layers of policy, reference, critic and reward model, once in the model's dtype
    (policy, reference, reward model and its copy) and twice with 16 bytes per weight; while it
    samples, a process holds the whole policy.
    """
    ppo = {"lora": {"r": 0}, "critic_lora": {"r": 0}}
    whole, sharded = (
        stages(ppo=ppo, launcher={"processes": 2, "shard": shard})["ppo"] for shard in (False, True)
    )
    half = KNOWN["embedded"].layer_weights / 2
    assert KNOWN["embedded"].layer_weights == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert whole - sharded == pytest.approx(2 * half * (2 * 16 + 4 * 2 - 2))


def test_ppo_holds_both_passes_only_if_a_micro_batch_is_the_rollout() -> None:
    long = {"batch_size": 32, "mini_batch_size": 32, "response_length": 400}
    whole, half, recomputed, full = (
        stages(ppo=long | more)["ppo"]
        for more in (
            {"micro_batch_size": 32},
            {"micro_batch_size": 16},
            {"micro_batch_size": 32, "gradient_checkpointing": True},
            {"micro_batch_size": 32, "lora": {"r": 0}, "critic_lora": {"r": 0}},
        )
    )
    # 16 layers of 32 rows and 10 more of the critic, against 16 layers of 16 rows
    assert (whole - LIBRARIES["cpu"]) / (half - LIBRARIES["cpu"]) > 2
    assert recomputed < half < whole < full
    assert (
        stages(algorithm="dpo")["ppo"]
        > stages(algorithm="dpo", dpo={"per_device_train_batch_size": 4})["ppo"]
    )


def test_best_of_n_samples_all_prompts_at_once() -> None:
    """n x prompts responses fill the batches by memory; the other algorithms sample a batch."""
    texts = Texts(((8,),) * 40, 20)
    lengths = TextLengths(texts, Texts(((9, 9),), 20), texts, texts, evaluation=4)

    def rows(**best_of_n: int) -> float:
        sections = {"assets": {"data": "files"}, "best_of_n": best_of_n, "ppo": FEW}
        params = Params.model_validate(sections | {"algorithm": "best_of_n"})
        model = replace(MODEL, limits=Limits(50, 1e9, 10**9))
        return stage_memory(params, lengths, model)["ppo"]

    # twice 4 x 40 responses more: keys and values of 8 + 4 tokens, logits, scoring with its share
    assert rows(n=8) - rows(n=4) > 160 * 12 * 48
    assert rows(n=8) - rows(n=4) == pytest.approx(rows(n=12) - rows(n=8))


def test_evaluation_holds_every_judge_that_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    lexicon, model, both = (
        stages(evaluate={"judges": judges})["evaluate"]
        for judges in (["lexicon"], ["fluency"], ["fluency", str(tmp_path)])
    )
    assert model - lexicon == 2 * 134_479_872
    assert both - model == 2 * SMALL.weights


SMALL_CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_capability_holds_what_it_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT and policy are one model with an adapter, or two; capability loads SFT once more. 300
    prompts fill the cache, tasks have batches of 32."""
    monkeypatch.chdir(tmp_path)
    assert stages()["capability"] == LIBRARIES["cpu"]
    tasks = stages(capability={"tasks": ["hellaswag"]})["capability"]
    both = {"lora": {"r": 0}, "critic_lora": {"r": 0}}
    full = stages(capability={"tasks": ["hellaswag"]}, ppo=both)["capability"]
    assert full - tasks == pytest.approx(2 * 134_479_872)
    (tmp_path / "slices").mkdir()
    rows = [json.dumps({"prompt": f"How {n}?", "label": "safe"}) for n in range(300)]
    (tmp_path / "slices/own.jsonl").write_text("\n".join(rows))
    weights, prompt = 2 * 2 * 134_479_872, Params().prepare.max_prompt_tokens
    sampling = stages()["capability"] - LIBRARIES["cpu"] - weights
    model = MemoryModel(KNOWN["embedded"], 2, "cpu", "grouped", Limits(1 << 26, 1 << 29, 1 << 12))
    assert sampling == pytest.approx(model.sampling(300, prompt, 64)) and sampling > 1 << 29
    assert tasks - LIBRARIES["cpu"] - weights == pytest.approx(model.sampling(32, prompt, 64))


def test_slices_have_their_own_lengths() -> None:
    counts: dict[str, Any] = {"demonstrations": [[20]], "pairs": [[20, 20]], "prompts": [[5]]}
    slices = measured(Params(), counts | {"slices": [7, 400], "evaluation": 4}).slices
    assert slices.longest(2) == Batch(2, 407, 400)


def test_replay_samples_candidates_and_retests_badcases() -> None:
    def replay(**section: int) -> float:
        return stages(replay={"policy_pairs": 0, **section})["replay"]

    base = replay()  # 64 badcases with 4 candidates and 4 tries
    assert replay(tries=8) > base
    assert replay(best_of=8) == replay(tries=8)
    # 128 prompts of policy_pairs with 4 responses are as many as 64 badcases with 8
    assert replay(policy_pairs=128) == replay(tries=8)
    assert replay(max_badcases=32) < base
    # not below the fresh samples
    few, fewer = (replay(max_badcases=number) for number in (8, 4))
    assert few == fewer


def test_a_round_without_data_has_the_lengths_that_the_params_admit() -> None:
    lengths = admitted(Params.model_validate({"assets": {"data": "files"}}))
    assert lengths.demonstrations.longest(2) == Batch(2, 2 * 96, 96)
    assert lengths.pairs.longest(2) == Batch(4, 4 * 96, 96)
    assert isinstance(lengths, TextLengths) and lengths.evaluation == 88
    assert admitted(Params()).demonstrations.longest(1).tokens == 46
