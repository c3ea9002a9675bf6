"""Every expected number was computed by hand (see the comments) or by a library."""

import itertools
import math

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from stages.lib.core.params.policy import PpoParams
from stages.ppo.common import rewards
from stages.ppo.trainer import functional as F

FULL = torch.ones(1, 3, dtype=torch.bool)


def test_kl_penalty_of_the_textbook():
    # logp -2.0 against -2.4 is a KL of 0.4: it costs 0.02 at beta 0.05, 0.04 at beta 0.1
    for beta, cost in ((0.05, 0.02), (0.1, 0.04)):
        rewards = F.token_rewards(
            torch.zeros(1),
            torch.tensor([[-2.0]]),
            torch.tensor([[-2.4]]),
            torch.ones(1, 1, dtype=torch.bool),
            beta,
        )
        assert rewards.item() == pytest.approx(-cost)


def test_score_lands_on_the_last_real_token():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = F.token_rewards(
        torch.tensor([5.0, 7.0]), torch.full((2, 3), -1.0), torch.full((2, 3), -1.5), mask, 0.1
    )
    # every real token costs 0.1 * 0.5
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 4.95, 0.0], [-0.05, -0.05, 6.95]]))


def test_an_episode_may_end_before_the_longest_ones():
    mask = torch.tensor([[True, False, False]])
    rewards = F.token_rewards(torch.tensor([5.0]), torch.zeros(1, 3), torch.zeros(1, 3), mask, 0.1)
    assert rewards.tolist() == [[5.0, 0.0, 0.0]]


def test_kl_estimators():
    logprobs, ref_logprobs = torch.tensor([[-2.0]]), torch.tensor([[-2.4]])
    assert F.kl_k1(logprobs, ref_logprobs).item() == pytest.approx(0.4)
    assert F.kl_k3(logprobs, ref_logprobs).item() == pytest.approx(
        math.exp(-0.4) - 1 + 0.4
    )  # 0.07032


def test_kl_estimators_are_unbiased():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = scipy_entropy(p.numpy(), q.numpy())
    for estimator in (F.kl_k1, F.kl_k3):
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-5)


def test_scores_are_clipped_then_penalised():
    scores, ended = torch.tensor([1.0, 51.0, 1.0, 51.0]), torch.tensor([True, True, False, False])
    lengths = torch.tensor([3, 10, 4, 12])
    options = {"clip": 5.0, "missing_eos_penalty": 1.0, "free_length": 4}
    shaped = rewards.shape_scores(scores, ended, lengths, length_penalty=0.0, **options)
    assert shaped.tolist() == [1.0, 5.0, 0.0, 4.0]
    # 0.25 per token above the fourth: 0, 6, 0 and 8 of them
    shaped = rewards.shape_scores(scores, ended, lengths, length_penalty=0.25, **options)
    assert shaped.tolist() == [1.0, 3.5, 0.0, 2.0]


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5; deltas: t2: 1-0.4=0.6, t1: 0+0.5*0.4-0.3=-0.1, t0: 0+0.5*0.3-0.2=-0.05
    # A2 = 0.6, A1 = -0.1+0.25*0.6 = 0.05, A0 = -0.05+0.25*0.05 = -0.0375
    advantages, returns = F.gae(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.3, 0.4]]), FULL, 0.5, 0.5
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.0375, 0.05, 0.6]]))
    torch.testing.assert_close(returns, torch.tensor([[0.1625, 0.35, 1.0]]))


def test_gae_ignores_numbers_after_the_end():
    mask = torch.tensor([[True, True, False]])
    advantages, returns = F.gae(
        torch.tensor([[0.0, 1.0, 99.0]]), torch.tensor([[0.2, 0.3, 55.0]]), mask, 1.0, 1.0
    )
    # undiscounted: A1 = 1-0.3 = 0.7, A0 = 1-0.2 = 0.8
    torch.testing.assert_close(advantages, torch.tensor([[0.8, 0.7, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.0, 0.0]]))


def test_whitening_sees_real_tokens_only():
    values, mask = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[True, True, False]])
    torch.testing.assert_close(F.whiten(values, mask), torch.tensor([[-1.0, 1.0, 0.0]]))
    torch.testing.assert_close(
        F.whiten(values, mask, shift_mean=False), torch.tensor([[1.0, 3.0, 0.0]])
    )


def test_whitening_divides_by_the_standard_deviation():
    # mean 4, variance 9, so +-3 becomes +-1; with the mean left 3 and 5
    values = torch.tensor([[1.0, 7.0, 100.0]])
    mask = torch.tensor([[True, True, False]])
    torch.testing.assert_close(F.whiten(values, mask), torch.tensor([[-1.0, 1.0, 0.0]]))
    unshifted = F.whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(unshifted, torch.tensor([[3.0, 5.0, 0.0]]))
    # a single token has variance 0
    assert F.whiten(torch.tensor([[2.0]]), torch.tensor([[True]])).tolist() == [[0.0]]


CLIP = F.Clip(0.2, 0.2)


def test_policy_loss_of_the_textbook():
    # ratio 1.3, advantage 2, clip 0.2: min(2.6, 2.4) = 2.4 is maximised
    loss, clipped = F.policy_loss(
        torch.tensor([math.log(1.3)]), torch.zeros(1), torch.tensor([2.0]), CLIP
    )
    assert loss.item() == pytest.approx(-2.4)
    assert clipped.item()


def test_policy_loss_is_not_clipped_if_that_would_lower_it():
    # ratio 1.3, advantage -2: max(2.6, 2.4) = 2.6, so the gradient is kept
    loss, clipped = F.policy_loss(
        torch.tensor([math.log(1.3)]), torch.zeros(1), torch.tensor([-2.0]), CLIP
    )
    assert loss.item() == pytest.approx(2.6)
    assert not clipped.item()


def test_the_ratio_is_relative_to_the_policy_that_sampled():
    # 0.3 / 0.5 = 0.6, clipped to 0.8. Advantage -2: max(1.2, 1.6); advantage 2: max(-1.2, -1.6)
    now, sampled = torch.tensor([0.3, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    loss, clipped = F.policy_loss(now, sampled, torch.tensor([-2.0, 2.0]), CLIP)
    torch.testing.assert_close(loss, torch.tensor([1.6, -1.2]))
    assert clipped.tolist() == [True, False]


def test_a_clip_range_above_1_of_its_own():
    # ratios 1.3 and 0.7 with advantages 1 and -1: 1.3 is within 1.4, 0.7 is clipped to 0.8
    now = torch.tensor([1.3, 0.7]).log()
    loss, clipped = F.policy_loss(now, torch.zeros(2), torch.tensor([1.0, -1.0]), F.Clip(0.2, 0.4))
    torch.testing.assert_close(loss, torch.tensor([-1.3, 0.8]))
    assert clipped.tolist() == [False, True]


def test_the_dual_clip_bounds_the_ratio_with_a_negative_advantage():
    # ratio 9: -(-2) 9 is bounded by 3 * 2; with a positive advantage it is clipped to 1.2 anyway
    now = torch.tensor([9.0, 9.0]).log().requires_grad_()
    clip = F.Clip(0.2, 0.2, delta=3.0)
    loss, _ = F.policy_loss(now, torch.zeros(2), torch.tensor([-2.0, 2.0]), clip)
    torch.testing.assert_close(loss, torch.tensor([6.0, -2.4]))
    loss.sum().backward()
    assert now.grad.tolist() == [0.0, 0.0]


def test_importance_weights_give_the_policys_gradient_on_the_samples_of_another():
    """Exactly, over all of five tokens, each as often as the sampler samples it."""
    generator = torch.Generator().manual_seed(0)
    logits, other, advantages = (torch.randn(5, generator=generator) for _ in range(3))
    logits.requires_grad_()
    logprobs, sampled = logits.log_softmax(0), other.log_softmax(0)
    gradients = []
    for frequencies, weights in (
        (logprobs.exp().detach(), torch.ones(5)),
        (sampled.exp(), F.importance_weights((logprobs - sampled).detach(), 100.0)),
        (sampled.exp(), torch.ones(5)),
    ):
        losses, _ = F.policy_loss(logprobs, logprobs.detach(), advantages, CLIP)
        loss = (frequencies * weights * losses).sum()
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert (gradients[2] - gradients[0]).abs().max() > 0.1
    ratios = (logprobs - sampled).exp()
    assert F.importance_weights(ratios.log(), 1.0).max() == 1 < ratios.max()


def test_weights_of_tokens_by_hand():
    """Of a mini-batch with 10 tokens in 4 episodes, of which these are two."""
    mask, tokens = torch.tensor([[True, True, False], [True, False, False]]), torch.tensor(10)
    for weights, expected in (
        (F.token_mean, [[0.1, 0.1, 0.0], [0.1, 0.0, 0.0]]),
        (F.response_mean, [[1 / 8, 1 / 8, 0.0], [1 / 4, 0.0, 0.0]]),
        (F.constant_length(20), [[1 / 80, 1 / 80, 0.0], [1 / 80, 0.0, 0.0]]),
    ):
        torch.testing.assert_close(weights(mask, tokens, 4), torch.tensor(expected))


def test_sequence_level_loss_by_hand():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    logprobs = torch.tensor([[math.log(1.3) * 2, 0.0, 99.0], [-0.3, 0.0, 0.0]])
    loss, clipped = F.sequence_policy_loss(
        logprobs, torch.zeros(2, 3), torch.tensor([[1.0, 3.0, 99.0], [-3.0, 0.0, 0.0]]), mask, CLIP
    )
    # first: mean log-ratio log 1.3, mean advantage 2: the textbook's 2.4, clipped
    # second: ratio exp(-0.1) = 0.9048 within the clip, advantage -1: 0.9048
    torch.testing.assert_close(loss, torch.tensor([-2.4, math.exp(-0.1)]))
    assert clipped.tolist() == [True, False]


OLD = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.0, -1.0], [-3.0, -1.0, -2.0]])
RATIOS = torch.tensor([[1.5, 0.5, 9.0], [0.5, 2.0, 1.0], [1.5, 1.5, 9.0]])
ADVANTAGES = torch.tensor([[2.0, 1.0, 5.0], [-1.0, -1.0, -1.0], [2.0, 2.0, 5.0]])
MASK = torch.tensor([[True, True, False], [True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("loss", "values", "clipped"),
    [
        # -2 * 1.5 clips to -2 * 1.2, -0.5 does not to -0.8; 0.5 clips to 0.8, 2 does not to 1.2
        (
            F.token_policy_loss,
            [[-2.4, -0.5, 0.0], [0.8, 2.0, 1.0], [-2.4, -2.4, 0.0]],
            [[1, 0, 0], [1, 0, 0], [1, 1, 0]],
        ),
        # ratios of whole responses: 0.75 with 2, 1 with -1, 2.25 with 2, which clips to 1.2
        (F.response_policy_loss, [-1.5, 1.0, -2.4], [0, 0, 1]),
    ],
)
def test_losses_of_tokens_and_of_responses_by_hand(loss, values, clipped):
    losses, shares = loss(OLD + RATIOS.log(), OLD, ADVANTAGES, MASK, CLIP)
    torch.testing.assert_close(losses, torch.tensor(values))
    torch.testing.assert_close(shares.float(), torch.tensor(clipped, dtype=torch.float32))


def test_value_loss_by_hand():
    # value changed 0 -> 1, clipped to 0.2, return 1: max(0, 0.64)/2; and return 0: max(1, 0.04)/2
    loss, clipped = F.value_loss(torch.ones(2), torch.zeros(2), torch.tensor([1.0, 0.0]), 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.32, 0.5]))
    assert clipped.tolist() == [True, False]


def test_a_value_that_falls_is_clipped_too():
    # 1 -> -1, clipped to 0.8. Return -1: max(0, 3.24)/2; return 2: max(9, 1.44)/2; and 0.9, which
    # is within the clip, return 0: 0.81/2 either way, which counts as not clipped
    values, returns = torch.tensor([-1.0, -1.0, 0.9]), torch.tensor([-1.0, 2.0, 0.0])
    loss, clipped = F.value_loss(values, torch.ones(3), returns, 0.2)
    torch.testing.assert_close(loss, torch.tensor([1.62, 4.5, 0.405]))
    assert clipped.tolist() == [True, False, False]


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 50.0]]), torch.tensor([[True, True, True, False]])
    # residuals 0, 0.5, 0: variance 0.0556 of 0.6667
    assert F.explained_variance(
        torch.tensor([[1.0, 1.5, 3.0, 0.0]]), returns, mask
    ) == pytest.approx(1 - (0.25 / 3 - (0.5 / 3) ** 2) / (2 / 3))
    assert math.isnan(F.explained_variance(returns, torch.ones(1, 4), mask))


def test_adaptive_kl_by_hand():
    kl = F.AdaptiveKLController(0.2, target=6.0, horizon=100)
    kl.update(6.6, episodes=10)  # error 0.1
    assert kl.kl_coef == pytest.approx(0.2 * 1.01)
    kl.update(600.0, episodes=10)  # error clipped to 0.2
    assert kl.kl_coef == pytest.approx(0.2 * 1.01 * 1.02)
    kl.update(0.0, episodes=10)  # error clipped to -0.2; 0.2 * 1.01 * 1.02 * 0.98 = 0.2019
    assert kl.kl_coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)


@pytest.mark.parametrize("episodes", [2**n for n in range(13)])
@pytest.mark.parametrize("horizon", [1, 8, 64, 512, 4096])
def test_adaptive_kl_approaches_its_target_without_overshooting(episodes, horizon):
    """On a policy whose KL is 1 / beta, for any batch and horizon."""
    controller = F.AdaptiveKLController(0.02, target=10.0, horizon=horizon)
    kls = [50.0]
    for _ in range(200):
        controller.update(kls[-1], episodes)
        kls.append(1 / controller.kl_coef)
    assert all(later <= kl for kl, later in itertools.pairwise(kls))
    assert kls[-1] >= 10.0 * (1 - 1e-9)
    if episodes >= horizon / 8:
        assert kls[-1] == pytest.approx(10.0, rel=0.05)


def test_beta_of_zero_needs_a_fixed_controller():
    with pytest.raises(ValueError, match="kl_coef 0 stays 0 with kl_control adaptive"):
        PpoParams(kl_coef=0.0)
    assert PpoParams(kl_coef=0.0, kl_control="fixed").kl_coef == 0.0


def test_proportional_kl_by_hand():
    kl = F.AdaptiveKLController(0.2, target=6.0, horizon=100, rule=F.proportional)
    kl.update(9.0, episodes=10)  # 1.5 times the target
    assert kl.kl_coef == pytest.approx(0.3)
    kl.update(600.0, episodes=10)  # at most twice
    assert kl.kl_coef == pytest.approx(0.6)
    kl.update(0.0, episodes=10)  # at least half
    assert kl.kl_coef == pytest.approx(0.3)


def test_fixed_kl_coefficient_does_not_change():
    kl = F.AdaptiveKLController(0.2, target=6.0, horizon=100, rule=F.fixed)
    kl.update(600.0, episodes=10)
    assert kl.kl_coef == 0.2


def test_beta_does_not_fall_below_its_start():
    kl = F.AdaptiveKLController(0.2, target=6.0, horizon=100)
    for _ in range(5):
        kl.update(0.0, episodes=10)
    assert kl.kl_coef == 0.2
    kl.update(60.0, episodes=10)
    assert kl.kl_coef == pytest.approx(0.2 * 1.02)
