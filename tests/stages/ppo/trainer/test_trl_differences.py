"""The formulas that differ from those of the last TRL with a PPOTrainer (`trl_1_12.py`)."""

import math
from types import SimpleNamespace

import pytest
import torch

from stages.lib.lm.packing import pack
from stages.ppo.trainer import functional as F
from tests.stages.ppo.trainer import trl_1_12 as trl
from tests.stages.ppo.trainer.trl_cases import (
    CPU,
    EOS,
    PAD,
    Cases,
    assert_same,
    rondo_rewards,
    shape_scores,
    tensor,
    trl_rewards,
)


def widen(cases: Cases) -> SimpleNamespace:
    """The same episodes with one more column of padding, as if one response were longer."""
    wide = {
        name: torch.nn.functional.pad(getattr(cases, name), (0, 1), value=PAD)
        for name in ("responses", "old", "ref")
    }
    wide["values"] = torch.nn.functional.pad(cases.values, (0, 1), value=0.7)
    wide["mask"] = torch.nn.functional.pad(cases.mask, (0, 1))
    last, padding, padding_p1 = trl.masks(wide["responses"], PAD)
    wide |= {"last": last, "padding": padding, "padding_p1": padding_p1}
    return SimpleNamespace(**vars(cases) | wide)


def test_score_comes_with_the_last_token():
    """TRL pays the score one step after the last token (at the last token if the batch is no
    wider), and has a value for that step.

    So the critic's estimate of the whole episode stands between the score and its tokens, the score
    is discounted once more, and an episode's advantages depend on the length of the others in its
    batch. The score is known at the last token, so it is paid there.
    """
    score, values, gamma, lam = tensor(1.0)[0], tensor([0.2, 0.6]), 0.9, 0.5
    for width, trl_advantage in (
        (1, 1 - 0.2),
        (2, (0.9 * 0.6 - 0.2) + 0.9 * 0.5 * (1 - 0.6)),
    ):
        zeros, mask = torch.zeros(1, width, dtype=torch.float64), torch.arange(width)[None] < 1
        last, padding, padding_p1 = trl.masks(torch.tensor([[EOS, PAD]])[:, :width], PAD)
        rewards = trl.token_rewards(score[None], zeros, zeros, last, padding, 0.2)[0]
        advantages, _ = trl.gae(rewards, values[:, :width], padding_p1, gamma, lam)
        assert advantages[0, 0].item() == pytest.approx(trl_advantage)
        rewards = F.token_rewards(score[None], zeros, zeros, mask, 0.2)
        advantages, returns = F.gae(rewards, values[:, :width], mask, gamma, lam)
        assert advantages[0].tolist() == pytest.approx([1 - 0.2, 0.0][:width])
        assert returns[0].tolist() == pytest.approx([1.0, 0.0][:width])


def test_advantages_do_not_depend_on_the_width_of_the_batch():
    """The same on random episodes: one more column changes all of TRL's advantages and returns of
    full-length responses, and none of those of `F.gae`.
    """
    cases = Cases("full")
    wide = widen(cases)
    for narrow_numbers, wide_numbers in zip(
        F.gae(rondo_rewards(cases), cases.values, cases.mask, 1.0, 0.9),
        F.gae(rondo_rewards(wide), wide.values, wide.mask, 1.0, 0.9),
        strict=True,
    ):
        assert_same(wide_numbers, torch.nn.functional.pad(narrow_numbers, (0, 1)))
    for narrow_numbers, wide_numbers in zip(
        trl.gae(trl_rewards(cases), cases.values, cases.padding_p1, 1.0, 0.9),
        trl.gae(trl_rewards(wide), wide.values, wide.padding_p1, 1.0, 0.9),
        strict=True,
    ):
        assert ((wide_numbers[:, :-1] - narrow_numbers).abs() > 1e-3).all()


def test_critic_learns_before_tokens_only():
    """TRL trains the critic at the step after the last token as well; here episodes have no such
    step, and nothing reads that value.
    """
    values, returns, mask = tensor([0.5, 3.0]), tensor([1.0, 1.0]), torch.tensor([[True, False]])
    _, _, padding_p1 = trl.masks(torch.tensor([[EOS, PAD]]), PAD)
    trl_loss, _ = trl.value_loss(values, values, returns, padding_p1, 0.2)
    assert trl_loss.item() == pytest.approx(0.5 * (0.5**2 + 2**2) / 2)
    token_losses, _ = F.value_loss(values, values, returns, 0.2)
    assert F.masked_mean(token_losses, mask).item() == pytest.approx(0.5 * 0.5**2)


def test_whitened_values_have_population_variance_one():
    """TRL divides by the unbiased variance, but only a scale is needed, not an estimate. With one
    token TRL's result is NaN, that of `F.whiten` is 0.
    """
    two, one = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    values = tensor([1.0, 3.0])  # mean 2, population variance 1, unbiased 2
    assert_same(
        trl.masked_whiten(values, two), tensor([-(2**-0.5), 2**-0.5]) / (1 + 1e-8 / 2) ** 0.5
    )
    assert_same(F.whiten(values, two), tensor([-1.0, 1.0]) / (1 + 1e-8) ** 0.5)
    assert trl.masked_whiten(values, one)[0, 0].isnan()
    assert F.whiten(values, one).tolist() == [[0.0, 0.0]]


def test_eos_is_a_token_even_if_it_is_the_pad_token():
    """TRL finds a response's end by its first pad token; if that is EOS (a common setting), no
    gradient teaches the policy to end.
    """
    responses = [[5, 6, EOS], [7, EOS]]
    last, padding, _ = trl.masks(torch.tensor([[5, 6, EOS], [7, EOS, EOS]]), EOS)
    assert last.tolist() == [1, 0]
    assert (~padding).tolist() == [[True, True, False], [True, False, False]]
    assert pack([[4], [4]], responses, CPU).response_mask.tolist() == [
        [True, True, True],
        [True, True, False],
    ]


def test_scores_are_clipped_before_the_penalty():
    """TRL does not clip: one extreme score of the reward model would dominate the advantages of the
    whole batch.
    """
    scores, responses = tensor(51.0, -51.0, 1.0), torch.tensor([[5, 6], [5, 6], [5, EOS]])
    assert trl.penalised(scores, responses, EOS, 1.0).tolist() == [50.0, -52.0, 1.0]
    ended = torch.tensor([False, False, True])
    shaped = shape_scores(scores, ended, clip=5.0, missing_eos_penalty=1.0)
    assert shaped.tolist() == [4.0, -6.0, 1.0]


def test_only_k1_as_a_reward_descends_the_kl():
    """TRL uses k3 as the reward penalty if so configured. The mean of k3 is the KL, but its policy
    gradient is not that of the KL, and nearly vanishes near the reference, where it should hold the
    policy. So k1 is the penalty here, and k3 is only logged.
    """
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    noise = torch.randn(6, generator=generator, dtype=torch.float64)
    logits = (reference + 0.1 * noise).requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)

    # one-token episodes, one per token of the vocabulary, weighted by the policy's probability
    old, ref = logprobs.detach()[:, None], reference[:, None]
    zeros, mask = torch.zeros(6), torch.ones(6, 1, dtype=torch.bool)
    last, padding, _ = trl.masks(torch.arange(3, 9)[:, None], PAD)

    def policy_gradient(rewards):
        expected_reward = (old.exp() * rewards * logprobs[:, None]).sum()
        return torch.autograd.grad(expected_reward, logits, retain_graph=True)[0]

    def trl_gradient(estimator):
        return policy_gradient(trl.token_rewards(zeros, old, ref, last, padding, 0.2, estimator)[0])

    gradient = policy_gradient(F.token_rewards(zeros, old, ref, mask, 0.2))
    assert_same(gradient, -0.2 * kl_gradient)
    assert_same(trl_gradient("k1"), -0.2 * kl_gradient)
    assert trl_gradient("k3").norm() < 0.1 * (0.2 * kl_gradient).norm()


def test_approximate_kl_is_k3():
    """TRL logs half the squared log-ratio, which is biased; k3 is not."""
    old, new, padding = tensor([0.0]), tensor([0.5]), torch.tensor([[False]])
    assert trl.policy_loss(new, old, old, padding, 0.2)[2].item() == pytest.approx(0.125)
    assert F.kl_k3(old, new).item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
