"""The formulas against those of the last TRL with a PPOTrainer (`trl_1_12.py`): here those that are
equal; `test_trl_differences.py` has those that differ, and why.
"""

import math

import pytest
import torch

from stages.lib.lm.logprobs import entropy_from_logits
from stages.lib.lm.packing import pack
from stages.ppo.trainer import functional as F
from tests.stages.ppo.trainer import trl_1_12 as trl
from tests.stages.ppo.trainer.trl_cases import (
    CPU,
    EOS,
    SHAPES,
    Cases,
    assert_same,
    rondo_rewards,
    shape_scores,
    trl_rewards,
)

DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.5, 0.0)]  # gamma, lambda


@pytest.fixture(params=SHAPES)
def cases(request):
    return Cases(request.param)


def test_response_mask(cases):
    responses = [row[:n].tolist() for row, n in zip(cases.responses, cases.lengths, strict=True)]
    prompts = [[5, 6][: 1 + i % 2] for i in range(len(responses))]
    mask = pack(prompts, responses, CPU).response_mask
    assert torch.equal(mask, ~cases.padding[:, : mask.shape[1]])
    assert cases.padding[:, mask.shape[1] :].all()


def test_masked_mean(cases):
    assert_same(
        F.masked_mean(cases.values, cases.mask), trl.masked_mean(cases.values, ~cases.padding)
    )


@pytest.mark.parametrize(("name", "estimator"), [("k1", F.kl_k1), ("k3", F.kl_k3)])
def test_kl(cases, name, estimator):
    _, trl_kl, trl_sequence_kl = trl.token_rewards(
        cases.scores, cases.old, cases.ref, cases.last, cases.padding, 0.2, name
    )
    kl = estimator(cases.old, cases.ref) * cases.mask
    assert_same(kl, trl_kl)
    assert_same(kl.sum(1).mean(), trl_sequence_kl)


@pytest.mark.parametrize("penalty", [0.0, 0.75])
def test_missing_eos(cases, penalty):
    """0.75 is exact in float32, in which `shape_scores` multiplies the penalty."""
    assert_same(
        shape_scores(cases.scores, cases.ended, clip=math.inf, missing_eos_penalty=penalty),
        trl.penalised(cases.scores, cases.responses, EOS, penalty),
    )


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_token_rewards(cases, kl_coef):
    """TRL pays the score at another step (`test_score_comes_with_the_last_token`); here it is moved
    to the last token.
    """
    expected = trl_rewards(cases, kl_coef)
    for row, n in enumerate(cases.lengths.tolist()):
        if n < expected.shape[1]:
            expected[row, n - 1] += expected[row, n]
            expected[row, n] = 0
    assert_same(rondo_rewards(cases, kl_coef), expected)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae(cases, gamma, lam):
    """On TRL's rewards and episodes, which are one step longer (`test_score_comes_with_the_last_
    token`). Rewards on padding do not matter to `F.gae`.
    """
    rewards = trl_rewards(cases)
    advantages, returns = F.gae(
        rewards + cases.new * cases.padding_p1, cases.values, ~cases.padding_p1, gamma, lam
    )
    trl_advantages, trl_returns = trl.gae(rewards, cases.values, cases.padding_p1, gamma, lam)
    assert_same(advantages, trl_advantages)
    assert_same(returns, trl_returns)


@pytest.mark.parametrize(
    ("shape", "gamma", "lam"),
    [("full", *discounts) for discounts in DISCOUNTS] + [(shape, 1.0, 1.0) for shape in SHAPES],
)
def test_advantages_and_returns_of_a_rollout(shape, gamma, lam):
    """Equal if all responses have full length; on shorter ones too if gamma = lambda = 1, because
    TRL's value after the end then cancels.
    """
    cases = Cases(shape)
    advantages, returns = F.gae(rondo_rewards(cases), cases.values, cases.mask, gamma, lam)
    trl_advantages, trl_returns = trl.gae(
        trl_rewards(cases), cases.values, cases.padding_p1, gamma, lam
    )
    assert_same(advantages, trl_advantages.masked_fill(cases.padding, 0))
    assert_same(returns, trl_returns.masked_fill(cases.padding, 0))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening(cases, shift_mean):
    """TRL divides by the unbiased variance (`test_whitened_values_have_population_variance_one`);
    here its results are rescaled to the population variance. TRL's rewards are one step longer.
    """
    padding, trl_whiten = (
        (cases.padding, trl.whitened_advantages)
        if shift_mean
        else (cases.padding_p1, trl.whitened_rewards)
    )
    population, unbiased = (
        trl.masked_var(cases.values, ~padding, unbiased=unbiased) for unbiased in (False, True)
    )
    mean = 0.0 if shift_mean else trl.masked_mean(cases.values, ~padding)
    rescale = ((unbiased + 1e-8) / (population + 1e-8)).sqrt()
    expected = mean + (trl_whiten(cases.values, padding) - mean) * rescale
    assert_same(F.whiten(cases.values, ~padding, shift_mean), expected.masked_fill(padding, 0))


@pytest.mark.parametrize("cliprange", [0.05, 0.2])
def test_policy_loss(cases, cliprange):
    logprobs, trl_logprobs = (cases.new.clone().requires_grad_() for _ in range(2))
    token_losses, clipped = F.policy_loss(
        logprobs, cases.old, cases.advantages, F.Clip(cliprange, cliprange)
    )
    loss = F.masked_mean(token_losses, cases.mask)
    trl_loss, trl_fraction, _, _ = trl.policy_loss(
        trl_logprobs, cases.old, cases.advantages, cases.padding, cliprange
    )
    assert_same(loss, trl_loss)
    assert F.masked_mean(clipped, cases.mask).item() == pytest.approx(trl_fraction.item())
    loss.backward()
    trl_loss.backward()
    assert_same(logprobs.grad, trl_logprobs.grad)


@pytest.mark.parametrize("cliprange", [0.05, 0.2])
def test_value_loss(cases, cliprange):
    """On TRL's tokens, of which there is one more (`test_critic_learns_before_tokens_only`)."""
    values, trl_values = (cases.new_values.clone().requires_grad_() for _ in range(2))
    token_losses, _ = F.value_loss(values, cases.values, cases.returns, cliprange)
    loss = F.masked_mean(token_losses, ~cases.padding_p1)
    trl_loss, _ = trl.value_loss(
        trl_values, cases.values, cases.returns, cases.padding_p1, cliprange
    )
    assert_same(loss, trl_loss)
    loss.backward()
    trl_loss.backward()
    assert_same(values.grad, trl_values.grad)


@pytest.mark.parametrize("exact", [True, False])
def test_value_clip_fraction(exact):
    """Values on both sides of 0, most of them moved by less than the clip range: those must not
    count as clipped.

    Sums and differences of multiples of 1/64 (exact) are not rounded; those of other numbers are.
    """
    generator = torch.Generator().manual_seed(0)
    old, new, returns = (
        0.1 * torch.randn(20, 50, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    if exact:
        old, new, returns = ((numbers * 64).round() / 64 for numbers in (old, new, returns))
    _, clipped = F.value_loss(new, old, returns, 0.125)
    _, trl_fraction = trl.value_loss(
        new, old, returns, torch.zeros(20, 50, dtype=torch.bool), 0.125
    )
    assert clipped.double().mean().item() == pytest.approx(trl_fraction.item())
    assert 0.05 < trl_fraction.item() < 0.5


def test_entropy(cases):
    logits, trl_logits = (cases.logits.clone().requires_grad_() for _ in range(2))
    entropy = entropy_from_logits(logits[cases.mask])
    trl_entropy = trl.entropy(trl_logits)[~cases.padding]
    assert_same(entropy, trl_entropy)
    entropy.sum().backward()
    trl_entropy.sum().backward()
    assert_same(logits.grad, trl_logits.grad)
