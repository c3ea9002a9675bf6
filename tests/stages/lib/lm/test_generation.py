"""Sampling and scoring do not depend on padding, batch and order; tokens have the model's
probabilities.
"""

from collections import Counter

import pytest
import torch

from stages.lib.core.progress import reporting
from stages.lib.lm import generation, world
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.generation import generate
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.packing import padding_free
from stages.lib.lm.scoring import reward_scores
from tests.stages.lib.lm.shapes import (
    ALL_SHAPES,
    CHANGED_LOGITS,
    PADDED,
    POSITIONS_ADDED,
    PROMPTS,
    RESPONSES,
    SHAPES,
    build,
    with_adapters,
)

SETTINGS = {"response_length": 6, "temperature": 1.0, "ends": EndTokens(2)}


def by_hand(model, prompt, response):
    """One row at a time, no padding, transformers' own forward."""
    logits = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
    return [logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("tokens", [1, 14, 4096])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_logprobs_do_not_depend_on_batch_padding_or_order(
    tiny_lm, monkeypatch, dtype, tolerance, tokens, order
):
    monkeypatch.setattr(world, "CPU_BATCH_TOKENS", tokens)
    model = tiny_lm().to(dtype)
    prompts, responses = [PROMPTS[i] for i in order], [RESPONSES[i] for i in order]
    logprobs = token_logprobs(model, prompts, responses)
    for row, prompt, response in zip(logprobs, prompts, responses, strict=True):
        assert row.tolist() == pytest.approx(by_hand(model, prompt, response), abs=tolerance)


@pytest.mark.parametrize("amount", [0, 5])
def test_logprobs_are_those_of_a_left_padded_batch(tiny_lm, amount):
    """transformers pads on the left for generation; neither side nor amount matter."""
    model = tiny_lm()
    rows = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    width = max(map(len, rows)) + amount
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    with torch.no_grad():
        logits = model(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits.log_softmax(-1)
    logprobs = token_logprobs(model, PROMPTS, RESPONSES)
    for i, response in enumerate(RESPONSES):
        expected = [
            logits[i, width - len(response) - 1 + t, token].item()
            for t, token in enumerate(response)
        ]
        assert logprobs[i].tolist() == pytest.approx(expected, abs=1e-5)


def test_scores_are_read_at_the_last_token(tiny_reward_model):
    model = tiny_reward_model()
    sequences = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    expected = [model(torch.tensor([s])).logits.item() for s in sequences]
    assert reward_scores(model, sequences).tolist() == pytest.approx(expected, abs=1e-5)


def sample(model, prompts, seed=3, **changes):
    generator = torch.Generator().manual_seed(seed)
    return generate(model, prompts, **(SETTINGS | changes), generator=generator)


def test_generation_is_reproducible_and_independent_of_the_batch(tiny_lm, monkeypatch):
    model, runs = tiny_lm(), []
    row_bytes = cache_bytes(model, max(map(len, PROMPTS)) + SETTINGS["response_length"])
    for rows in (1, 2, 4, 4):
        monkeypatch.setattr(generation, "CPU_CACHE_BYTES", rows * row_bytes)
        runs.append(sample(model, PROMPTS))
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert all(2 not in response[:-1] for response in runs[0])


def cache_bytes(model, tokens):
    """Bytes of the cache that transformers fills with one row of so many tokens."""
    layers = model(torch.full((1, tokens), 5), use_cache=True).past_key_values.layers
    return sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))


def test_the_heap_is_trimmed_after_each_batch(tiny_lm, monkeypatch):
    trims: list[bool] = []
    monkeypatch.setattr(generation, "rows_per_batch", lambda *_: 2)
    monkeypatch.setattr(generation, "trim_heap", lambda: trims.append(True))
    sample = torch.Generator().manual_seed(0)
    generate(
        tiny_lm(),
        [[5], [6], [7]],
        response_length=2,
        temperature=1.0,
        generator=sample,
        ends=EndTokens(2),
    )
    assert len(trims) == 2


@pytest.mark.parametrize("shape", [*SHAPES, *POSITIONS_ADDED])
def test_batches_are_as_large_as_the_cache_may_be(shape, monkeypatch):
    model = build(ALL_SHAPES[shape], "eager")
    monkeypatch.setattr(generation, "CPU_CACHE_BYTES", 3 * cache_bytes(model, 20))
    assert [generation.rows_per_batch(model, n) for n in (20, 21, 10, 1000)] == [3, 2, 6, 1]


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("attention", ["grouped", "eager", "sdpa"])
@pytest.mark.parametrize("adapters", [False, True])
def test_generation_is_the_whole_forward_pass_token_by_token(shape, attention, adapters):
    """One row at a time, without cache, batch, padding or merged adapters; the same uniform numbers
    become tokens by hand.
    """
    model = (
        with_adapters(build(ALL_SHAPES[shape], attention))
        if adapters
        else build(ALL_SHAPES[shape], attention)
    )
    prompts = PROMPTS * 4
    uniforms = torch.rand(len(prompts), 6, generator=torch.Generator().manual_seed(3)).tolist()
    rows: list[list[int]] = []
    for prompt, row in zip(prompts, uniforms, strict=True):
        tokens: list[int] = []
        for uniform in row:
            with torch.no_grad():
                below = (
                    model(torch.tensor([prompt + tokens]))
                    .logits[0, -1]
                    .double()
                    .softmax(-1)
                    .cumsum(-1)
                )
            tokens.append(int((below <= uniform).sum()))
        rows.append(tokens)
    (eos, _), (other, _) = Counter(token for tokens in rows for token in tokens[1:4]).most_common(2)
    for ends in (EndTokens(eos), EndTokens(eos, (other,))):
        expected = [
            tokens[: next((i for i, t in enumerate(tokens) if t in ends.ids), len(tokens)) + 1]
            for tokens in rows
        ]
        assert sample(model, prompts, ends=ends) == expected
    assert {row[-1] for row in expected if len(row) < 6} == {eos, other}


def test_first_token_is_sampled_with_the_models_probabilities(tiny_lm):
    model, draws = tiny_lm(), 4000
    first = sample(model, [PROMPTS[0]] * draws, seed=0, response_length=1)
    shares = torch.bincount(torch.tensor([r[0] for r in first]), minlength=40) / draws
    expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    # each of 40 binomial shares is within 4 standard errors: sqrt(.25 / 4000) * 4
    assert (shares - expected).abs().max() < 0.032


def test_a_batch_reports_each_token_and_is_full_when_all_rows_have_ended(tiny_lm, monkeypatch):
    def lines_of(ends):
        lines = []
        with reporting("sft@r0", lines.append, quiet=0.0):
            generate(
                tiny_lm(),
                PROMPTS[:2],
                response_length=4,
                temperature=1.0,
                ends=ends,
                generator=torch.Generator().manual_seed(0),
            )
        return [line.partition("  ")[0] for line in lines]

    assert lines_of(EndTokens(39)) == [
        f"[sft@r0] sampling {done}/8 tokens" for done in (2, 4, 6, 8)
    ]
    every_token = EndTokens(2, tuple(token for token in range(40) if token != 2))
    assert lines_of(every_token) == ["[sft@r0] sampling 8/8 tokens"]


@pytest.mark.parametrize("shape", [*PADDED, *CHANGED_LOGITS])
def test_numbers_and_samples_are_those_of_single_rows(shape):
    """Of transformers' own forward pass, one row at a time, without padding and cache."""
    model = build((PADDED | CHANGED_LOGITS)[shape])
    logprobs = token_logprobs(model, PROMPTS, RESPONSES)
    for row, prompt, response in zip(logprobs, PROMPTS, RESPONSES, strict=True):
        assert row.tolist() == pytest.approx(by_hand(model, prompt, response), abs=1e-4)

    settings = SETTINGS | {"response_length": 12, "ends": EndTokens(2, (3, 4, 5, 6, 7))}
    sampled = generate(model, PROMPTS, generator=torch.Generator().manual_seed(3), **settings)
    uniforms = torch.rand(len(PROMPTS), 12, generator=torch.Generator().manual_seed(3))
    for prompt, response, row in zip(PROMPTS, sampled, uniforms, strict=True):
        for position, token in enumerate(response):
            ids = torch.tensor([prompt + response[:position]])
            with torch.no_grad():
                below = model(ids).logits[0, -1].double().softmax(-1).cumsum(-1)
            # the first token whose cumulative probability is above the uniform
            assert token == int((below <= row[position].double()).sum())
    assert len({len(response) for response in sampled}) > 1  # finished rows left the batch


@pytest.mark.parametrize("shape", PADDED)
def test_a_padded_batch_of_a_trainer_does_not_leak(shape):
    model = build(PADDED[shape])
    rows = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    with torch.no_grad(), padding_free(model):
        states = model.base_model(ids, attention_mask=mask).last_hidden_state
        for row, computed in zip(rows, states, strict=True):
            alone = model.base_model(torch.tensor([row]), attention_mask=torch.ones(1, len(row)))
            torch.testing.assert_close(
                computed[: len(row)], alone.last_hidden_state[0], atol=1e-4, rtol=1e-4
            )
