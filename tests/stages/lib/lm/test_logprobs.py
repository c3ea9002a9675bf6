"""Log-probabilities and entropies in chunks equal those of one float64 softmax, with gradients, and
keep no float32 copy of the logits.
"""

import math

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from stages.lib.lm import logprobs
from stages.lib.lm.logprobs import entropy_from_logits, selective_log_softmax

N, V = 7, 11


@pytest.fixture(params=[1, 3, N, 100], ids=lambda rows: f"{rows} rows a part")
def logits(request, monkeypatch):
    monkeypatch.setattr(logprobs, "CELLS", request.param * V)
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
