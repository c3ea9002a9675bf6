"""Rows end to end against forward passes of one row at a time, on common architectures."""

from contextlib import nullcontext

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stages.lib.core.progress import reporting
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.packing import find_layers, hidden_states, pack, padding_free
from tests.stages.lib.lm.shapes import (
    ALL_SHAPES,
    PROMPTS,
    RESPONSES,
    SHAPES,
    build,
    with_adapters,
)

CPU = torch.device("cpu")


def test_pack_by_hand():
    packed = pack([[5, 6], [7]], [[8], [9, 10, 2]], CPU)
    assert packed.input_ids.tolist() == [5, 6, 8, 7, 9, 10, 2]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.lengths == [3, 4]
    assert packed.predicts.tolist() == [1, 3, 4, 5]
    assert packed.targets.tolist() == [8, 9, 10, 2]
    assert packed.response_mask.tolist() == [[True, False, False], [True, True, True]]
    assert packed.last.tolist() == [2, 6]
    assert packed.to_rows(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [
        [1.0, 0.0, 0.0],
        [2.0, 3.0, 4.0],
    ]
    assert packed.pad(packed.input_ids).tolist() == [[5, 6, 8, 0], [7, 9, 10, 2]]
    assert packed.unpad(packed.pad(packed.input_ids)).tolist() == packed.input_ids.tolist()


def test_an_appended_eos_is_read_but_not_predicted():
    packed = pack([[5, 6], [7]], [[8], [9, 2]], CPU, EndTokens(2))
    assert packed.input_ids.tolist() == [5, 6, 8, 2, 7, 9, 2]
    assert packed.lengths == [4, 3]
    assert packed.predicts.tolist() == [1, 4, 5]
    assert packed.targets.tolist() == [8, 9, 2]
    assert packed.response_mask.tolist() == [[True, False], [True, True]]
    assert packed.last.tolist() == [3, 6]


def test_the_canonical_end_token_is_read_in_place_of_another_that_is_predicted():
    packed = pack([[5, 6], [7]], [[8, 9], [9, 2]], CPU, EndTokens(2, (9,)))
    assert packed.input_ids.tolist() == [5, 6, 8, 2, 7, 9, 2]
    assert packed.lengths == [4, 3]
    assert packed.predicts.tolist() == [1, 2, 4, 5]
    assert packed.targets.tolist() == [8, 9, 9, 2]
    assert packed.last.tolist() == [3, 6]


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("attention", ["grouped", "eager", "sdpa"])
def test_states_and_gradients_are_those_of_single_rows(shape, attention):
    packing, alone = build(ALL_SHAPES[shape], attention), build(ALL_SHAPES[shape], "eager")
    states = hidden_states(packing, pack(PROMPTS, RESPONSES, CPU))
    single = [
        alone.base_model(torch.tensor([p + r])).last_hidden_state[0]
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    torch.testing.assert_close(states, torch.cat(single))
    for result in (states, torch.cat(single)):
        result.pow(3).sum().backward()
    for packed_weight, single_weight in zip(
        packing.base_model.parameters(), alone.base_model.parameters(), strict=True
    ):
        torch.testing.assert_close(packed_weight.grad, single_weight.grad, rtol=1e-3, atol=1e-3)


def varlen_attention(module, query, key, value, attention_mask, scaling, position_ids=None, **_):
    """What FlashAttention-2 computes for one row without a mask, written plainly: a causal softmax
    per run of positions that starts at 0.
    """
    assert attention_mask is None and len(query) == 1
    run = (position_ids[0] == 0).cumsum(0)
    visible = (run[:, None] == run) & (position_ids[0][:, None] >= position_ids[0])
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, float("-inf"))
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_flash_attention_finds_the_rows_by_their_positions(shape, monkeypatch):
    """FlashAttention-2 itself needs a GPU; a stand-in shows what it is given."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", varlen_attention)
    packing, alone = build(ALL_SHAPES[shape], "eager"), build(ALL_SHAPES[shape], "eager")
    packing.config._attn_implementation = "flash_attention_2"
    states = hidden_states(packing, pack(PROMPTS, RESPONSES, CPU))
    single = [
        alone.base_model(torch.tensor([p + r])).last_hidden_state[0]
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    torch.testing.assert_close(states, torch.cat(single))


@pytest.mark.parametrize("shape", [*SHAPES, "gpt2"])
@pytest.mark.parametrize(
    "mask", [[[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]]], ids=["left", "right"]
)
def test_a_padded_batch_of_a_trainer_runs_without_its_padding(shape, mask):
    model, ids, real = build(ALL_SHAPES[shape]), torch.arange(4, 12).view(2, 4), torch.tensor(mask)
    widths: list[torch.Size] = []
    *_, layers = find_layers(model)
    layers[0].register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[:2]))
    results = []
    for context in (padding_free(model), nullcontext()):
        model.zero_grad()
        with context:
            logits = model(
                ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0)
            ).logits
        logits[real.bool()].pow(3).sum().backward()
        results.append(
            [logits[real.bool()], *(weight.grad.clone() for weight in model.parameters())]
        )
    assert widths == [(1, 6), (2, 4)]
    for padding_free_value, padded_value in zip(*results, strict=True):
        torch.testing.assert_close(padding_free_value, padded_value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("limit", "batches"),
    [
        (4096, [[1, 3, 0, 2]]),
        (8, [[1, 3, 0], [2]]),  # 3 rows of 2 tokens at most, then one of 9
        (4, [[1, 3], [0], [2]]),
        (1, [[1], [3], [0], [2]]),
    ],
)
def test_batches_hold_so_many_tokens_with_their_padding(monkeypatch, limit, batches):
    monkeypatch.setattr(world, "CPU_BATCH_TOKENS", limit)
    lengths = [2 if limit != 4 else 3, 1, 9, 1]
    assert list(world.batches_by_tokens(lengths, CPU, "scoring")) == batches
    with reporting("sft@r0", (lines := list[str]()).append, quiet=0.0):
        list(world.batches_by_tokens(lengths, CPU, "scoring"))
    assert len(lines) == len(batches)
    first, total = sum(lengths[row] for row in batches[0]), sum(lengths)
    assert lines[0].startswith(f"[sft@r0] scoring {first}/{total} tokens")
    assert lines[-1].startswith(f"[sft@r0] scoring {total}/{total} tokens")


def test_the_heap_is_trimmed_after_a_pass(monkeypatch):
    steps: list[object] = []
    monkeypatch.setattr(world, "CPU_BATCH_TOKENS", 4)
    monkeypatch.setattr(world, "trim_heap", lambda: steps.append("trimmed"))
    steps.extend(world.batches_by_tokens([2, 1, 9], CPU, "scoring"))
    assert steps == [[1, 0], [2], "trimmed"]


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_adapters_of_a_bfloat16_model_compute_in_bfloat16(shape):
    """Their weights are float32. Those of GPT-2's Conv1D layers are peft's own, which compute in
    float32 without autocast.
    """
    model = with_adapters(build(ALL_SHAPES[shape], "eager").to(torch.bfloat16))
    adapters = {
        name: module for name, module in model.named_modules() if name.endswith("lora_A.default")
    }
    assert {module.weight.dtype for module in adapters.values()} == {torch.float32}
    seen: list[torch.dtype] = []
    for module in adapters.values():
        module.register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
    states = hidden_states(model, pack(PROMPTS, RESPONSES, CPU))
    assert states.dtype is torch.bfloat16
    assert set(seen) == ({torch.bfloat16} if shape == "gpt2" else set())
