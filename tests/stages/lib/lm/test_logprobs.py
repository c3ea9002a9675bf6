"""Log-probabilities, entropies and KL in pieces and chunks equal those of one float64 softmax, with
gradients, and keep neither the logits nor a float32 copy of them.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from stages.lib.lm import logprobs
from stages.lib.lm.logprobs import (
    compare_logits,
    compare_states,
    entropy_from_logits,
    response_entropies,
    response_logprobs,
    selective_log_softmax,
)
from stages.lib.lm.packing import hidden_states, pack
from tests.stages.lib.lm.shapes import PROMPTS, RESPONSES

N, V = 7, 11


@pytest.fixture(params=[1, 3, N, 100], ids=lambda rows: f"{rows} rows a part")
def logits(request, monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_CHUNK", request.param * V)
    return torch.randn(N, V, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_a_whole_softmax(logits, temperature):
    targets, weights = torch.arange(N), torch.linspace(-1, 2, N)
    exact = (logits.detach().double() / temperature).requires_grad_()
    chosen = exact.log_softmax(-1)[torch.arange(N), targets]
    entropies = -(exact.softmax(-1) * exact.log_softmax(-1)).sum(-1)
    for values, exact_values in (
        (selective_log_softmax(logits, targets, temperature), chosen),
        (entropy_from_logits(logits, temperature), entropies),
    ):
        torch.testing.assert_close(values, exact_values.float())
        [gradient] = torch.autograd.grad((values * weights).sum(), logits)
        [expected] = torch.autograd.grad((exact_values * weights).sum(), exact, retain_graph=True)
        torch.testing.assert_close(gradient, (expected / temperature).float())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_and_reference_are_compared_token_by_token(logits, temperature):
    targets, ref_logits = torch.arange(N), logits.detach().roll(1, 0)
    statistics = compare_logits(logits, ref_logits, targets, temperature)
    p, q = (
        (values.detach().double() / temperature).softmax(-1).numpy()
        for values in (logits, ref_logits)
    )
    for values, expected in (
        (statistics.logprobs, torch.tensor(p).log().diagonal()),
        (statistics.ref_logprobs, torch.tensor(q).log().diagonal()),
        (statistics.entropies, torch.tensor(scipy_entropy(p, axis=1))),
        (statistics.kl, torch.tensor(scipy_entropy(p, q, axis=1))),
    ):
        torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_logits_give_float32_values_and_no_float32_copy_is_kept():
    logits = torch.randn(N, V).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.dtype) or tensor, lambda tensor: tensor
    ):
        results = selective_log_softmax(logits, torch.arange(N)), entropy_from_logits(logits)
    assert torch.float32 not in kept
    wide = logits.detach().float()
    torch.testing.assert_close(results[0], wide.log_softmax(-1).diagonal())
    torch.testing.assert_close(results[1], torch.tensor(scipy_entropy(wide.softmax(-1), axis=1)))
    sum(values.sum() for values in results).backward()
    assert logits.grad.dtype is torch.bfloat16


def test_temperature_by_hand():
    # at temperature 2 the odds 1:4 become 1:2
    assert selective_log_softmax(
        torch.tensor([[0.0, math.log(4.0)]]), torch.tensor([1]), 2.0
    ).exp().item() == pytest.approx(2 / 3)


def test_entropies_are_scipys():
    p = torch.tensor([[0.5, 0.3, 0.2], [1 / 3] * 3])
    torch.testing.assert_close(entropy_from_logits(p.log()), torch.tensor(scipy_entropy(p, axis=1)))


def test_no_rows():
    assert (
        selective_log_softmax(torch.empty(0, V), torch.empty(0, dtype=torch.long)).shape
        == entropy_from_logits(torch.empty(0, V)).shape
        == (0,)
    )


@pytest.fixture
def packed():
    return pack(PROMPTS, RESPONSES, torch.device("cpu"))


def of_a_piece(monkeypatch, model, rows):
    """Let a piece have so many rows; returns the number of rows of each call of the head."""
    head, sizes = model.get_output_embeddings(), []
    monkeypatch.setattr(logprobs, "CPU_PIECE", rows * head.weight.shape[0])
    head.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    return sizes


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("function", [response_logprobs, response_entropies])
def test_values_and_gradients_from_states_do_not_depend_on_pieces(
    tiny_lm, packed, monkeypatch, rows, function
):
    model = tiny_lm()
    hidden = hidden_states(model, packed).detach().requires_grad_()
    weights = torch.linspace(-1, 2, len(packed.targets))
    logits = model.lm_head(hidden[packed.predicts]).log_softmax(-1)
    expected = (
        logits.gather(1, packed.targets[:, None])[:, 0]
        if function is response_logprobs
        else -(logits.exp() * logits).sum(-1)
    )
    gradients = [hidden, model.lm_head.weight]
    expected_gradients = torch.autograd.grad((expected * weights).sum(), gradients)
    sizes = of_a_piece(monkeypatch, model, rows)
    values = function(model, packed, hidden, 1.0)[packed.response_mask]
    torch.testing.assert_close(values, expected)
    assert max(sizes) == min(rows, len(packed.targets))
    for gradient, expected_gradient in zip(
        torch.autograd.grad((values * weights).sum(), gradients), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_no_logits_of_several_pieces_are_kept(tiny_lm, packed, monkeypatch):
    model = tiny_lm()
    hidden = hidden_states(model, packed).detach().requires_grad_()
    of_a_piece(monkeypatch, model, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    ):
        response_logprobs(model, packed, hidden, 1.0)
    assert model.config.vocab_size not in {shape[-1] for shape in kept if len(shape) == 2}


@pytest.mark.parametrize("rows", [2, 100])
def test_the_reference_has_a_head_of_its_own(tiny_lm, packed, monkeypatch, rows):
    policy, other = tiny_lm(), tiny_lm(5)
    opened = []

    @contextmanager
    def reference():
        opened.append(True)
        yield other

    with torch.no_grad():
        states = hidden_states(policy, packed), hidden_states(other, packed)
        p, q = (
            model.lm_head(hidden[packed.predicts]).log_softmax(-1)
            for model, hidden in zip((policy, other), states, strict=True)
        )
    of_a_piece(monkeypatch, policy, rows)
    statistics = compare_states(policy, reference, packed, *states, 1.0)
    assert statistics.kl.shape == packed.response_mask.shape
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.min() > 1e-3
    torch.testing.assert_close(statistics.kl[packed.response_mask], kl, rtol=1e-3, atol=1e-5)
    chosen = q.gather(1, packed.targets[:, None])[:, 0]
    torch.testing.assert_close(statistics.ref_logprobs[packed.response_mask], chosen)
    assert opened
