"""Our formulas against those of the last TRL with a PPOTrainer (`trl_1_12.py`): equal where both do
the same, and where not, why not.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.logprobs import entropy_from_logits
from stages.lib.lm.packing import pack
from stages.ppo.common import rewards
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.update import PpoTrainer, describe
from tests.stages.ppo.trainer import trl_1_12 as trl

PAD, EOS, CPU = 0, 2, torch.device("cpu")
SHAPES = {
    "full": ([4, 4, 4], 4),
    "ragged": ([6, 1, 4, 3, 6, 2], 6),
    "padded": ([2, 5, 1], 9),
    "one row": ([3], 5),
}  # lengths, columns
DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.5, 0.0)]


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, check_dtype=False)


def episodes(shape, seed=0):
    """Random responses and numbers, these behind the end of a response as well. A response as long
    as the batch is wide may be cut off.
    """
    (lengths, width), generator = SHAPES[shape], torch.Generator().manual_seed(seed)

    def normal(*more):
        return torch.randn(len(lengths), width, *more, generator=generator, dtype=torch.float64)

    lengths, old, values = torch.tensor(lengths), normal() - 2, normal()
    mask = torch.arange(width) < lengths[:, None]
    responses = torch.randint(3, 40, mask.shape, generator=generator).masked_fill(~mask, PAD)
    ended = (lengths < width) | (torch.arange(len(lengths)) % 2 == 0)
    responses[ended, lengths[ended] - 1] = EOS
    last, padding, padding_p1 = trl.masks(responses, PAD)
    return SimpleNamespace(
        lengths=lengths, mask=mask, responses=responses, ended=ended, last=last, padding=padding, padding_p1=padding_p1,
        scores=normal()[:, 0] * 3, old=old, new=old + 0.3 * normal(), ref=old + 0.5 * normal(), values=values,
        new_values=values + 0.3 * normal(), advantages=normal(), returns=values + normal(), logits=2 * normal(7),
    )  # fmt: skip


@pytest.fixture(
    params=[(shape, seed) for shape in SHAPES for seed in range(3)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def e(request):
    return episodes(*request.param)


def shaped(scores, ended, **settings):
    return rewards.shape_scores(
        scores, ended, torch.ones_like(scores), length_penalty=0.0, free_length=0, **settings
    )


def trl_rewards(e, kl_coef=0.2, **options):
    return trl.token_rewards(e.scores, e.old, e.ref, e.last, e.padding, kl_coef, **options)[0]


def our_rewards(e, kl_coef=0.2):
    return F.token_rewards(e.scores, e.old, e.ref, e.mask, kl_coef)


def wider(e):
    """The same episodes beside a longer one: a column more."""
    more = {
        name: torch.nn.functional.pad(getattr(e, name), (0, 1), value=PAD)
        for name in ("responses", "old", "ref")
    }
    more["values"] = torch.nn.functional.pad(e.values, (0, 1), value=0.7)
    more["mask"] = torch.nn.functional.pad(e.mask, (0, 1))
    last, padding, padding_p1 = trl.masks(more["responses"], PAD)
    return SimpleNamespace(
        **vars(e) | more | {"last": last, "padding": padding, "padding_p1": padding_p1}
    )


# Where both do the same


def test_response_mask(e):
    rows = [row[:n].tolist() for row, n in zip(e.responses, e.lengths, strict=True)]
    ours = pack([[5, 6][: 1 + i % 2] for i in range(len(rows))], rows, CPU).response_mask
    assert torch.equal(ours, ~e.padding[:, : ours.shape[1]])
    assert e.padding[:, ours.shape[1] :].all()


def test_masked_mean(e):
    assert_same(F.masked_mean(e.values, e.mask), trl.masked_mean(e.values, ~e.padding))


@pytest.mark.parametrize(("estimator", "ours"), [("k1", F.kl_k1), ("k3", F.kl_k3)])
def test_kl(e, estimator, ours):
    _, kl, of_sequences = trl.token_rewards(
        e.scores, e.old, e.ref, e.last, e.padding, 0.2, estimator
    )
    assert_same(ours(e.old, e.ref) * e.mask, kl)
    assert_same((ours(e.old, e.ref) * e.mask).sum(1).mean(), of_sequences)


@pytest.mark.parametrize("penalty", [0.0, 0.75])
def test_missing_eos(e, penalty):
    """0.75, since ours multiplies the penalty in float32."""
    assert_same(
        shaped(e.scores, e.ended, clip=math.inf, missing_eos_penalty=penalty),
        trl.penalised(e.scores, e.responses, EOS, penalty),
    )


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_token_rewards(e, kl_coef):
    """All but the place of the score (see below): TRL's is moved here to the last token."""
    theirs = trl_rewards(e, kl_coef)
    for row, n in enumerate(e.lengths.tolist()):
        if n < theirs.shape[1]:
            theirs[row, n - 1] += theirs[row, n]
            theirs[row, n] = 0
    assert_same(our_rewards(e, kl_coef), theirs)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae(e, gamma, lam):
    """On the same rewards and the same episodes, which for TRL are a step longer (see below). Ours
    may have any rewards on padding.
    """
    rewards = trl_rewards(e)
    ours = F.gae(rewards + e.new * e.padding_p1, e.values, ~e.padding_p1, gamma, lam)
    for mine, theirs in zip(
        ours, trl.gae(rewards, e.values, e.padding_p1, gamma, lam), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize(
    ("shape", "gamma", "lam"),
    [("full", *each) for each in DISCOUNTS] + [(shape, 1.0, 1.0) for shape in SHAPES],
)
def test_advantages_and_returns_of_a_rollout(shape, gamma, lam):
    """On responses of full length both are one; on shorter ones too if gamma = lambda = 1, since
    TRL's value after the end then cancels.
    """
    e = episodes(shape)
    for ours, theirs in zip(
        F.gae(our_rewards(e), e.values, e.mask, gamma, lam),
        trl.gae(trl_rewards(e), e.values, e.padding_p1, gamma, lam),
        strict=True,
    ):
        assert_same(ours, theirs.masked_fill(e.padding, 0))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening(e, shift_mean):
    """All but Bessel's correction (see below), which is taken out of TRL's here. TRL's rewards are
    a step longer.
    """
    outside, whitened = (
        (e.padding, trl.whitened_advantages) if shift_mean else (e.padding_p1, trl.whitened_rewards)
    )
    population, unbiased = (
        trl.masked_var(e.values, ~outside, unbiased=which) for which in (False, True)
    )
    mean = 0.0 if shift_mean else trl.masked_mean(e.values, ~outside)
    theirs = (
        mean
        + (whitened(e.values, outside) - mean) * ((unbiased + 1e-8) / (population + 1e-8)).sqrt()
    )
    assert_same(F.whiten(e.values, ~outside, shift_mean), theirs.masked_fill(outside, 0))


@pytest.mark.parametrize("cliprange", [0.05, 0.2])
def test_policy_loss(e, cliprange):
    ours, theirs = (e.new.clone().requires_grad_() for _ in range(2))
    per_token, clipped = F.policy_loss(ours, e.old, e.advantages, cliprange)
    loss, fraction, _, _ = trl.policy_loss(theirs, e.old, e.advantages, e.padding, cliprange)
    assert_same(F.masked_mean(per_token, e.mask), loss)
    assert F.masked_mean(clipped, e.mask).item() == pytest.approx(fraction.item())
    F.masked_mean(per_token, e.mask).backward()
    loss.backward()
    assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("cliprange", [0.05, 0.2])
def test_value_loss(e, cliprange):
    """On the same tokens, which for TRL are one more (see below)."""
    ours, theirs = (e.new_values.clone().requires_grad_() for _ in range(2))
    per_token, _ = F.value_loss(ours, e.values, e.returns, cliprange)
    loss, _ = trl.value_loss(theirs, e.values, e.returns, e.padding_p1, cliprange)
    assert_same(F.masked_mean(per_token, ~e.padding_p1), loss)
    F.masked_mean(per_token, ~e.padding_p1).backward()
    loss.backward()
    assert_same(ours.grad, theirs.grad)


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
        old, new, returns = ((each * 64).round() / 64 for each in (old, new, returns))
    _, clipped = F.value_loss(new, old, returns, 0.125)
    _, fraction = trl.value_loss(new, old, returns, torch.zeros(20, 50, dtype=torch.bool), 0.125)
    assert clipped.double().mean().item() == pytest.approx(fraction.item())
    assert 0.05 < fraction.item() < 0.5


def test_entropy(e):
    ours, theirs = (e.logits.clone().requires_grad_() for _ in range(2))
    assert_same(entropy_from_logits(ours[e.mask]), trl.entropy(theirs)[~e.padding])
    entropy_from_logits(ours[e.mask]).sum().backward()
    trl.entropy(theirs)[~e.padding].sum().backward()
    assert_same(ours.grad, theirs.grad)


# Where we differ on purpose


def test_score_comes_with_the_last_token():
    """TRL pays the score one step after the last token (at the last token where the batch is no
    wider), and has a value for that step.

    So the critic's guess at what the episode was worth stands between the score and its tokens, the
    score is discounted once more, and an episode's advantages depend on how long the others of its
    batch are. The score is known at the last token; ours is paid there.
    """
    score, values, gamma, lam = tensor(1.0)[0], tensor([0.2, 0.6]), 0.9, 0.5
    for width, theirs in (
        (1, 1 - 0.2),
        (2, (0.9 * 0.6 - 0.2) + 0.9 * 0.5 * (1 - 0.6)),
    ):
        zeros, mask = torch.zeros(1, width, dtype=torch.float64), torch.arange(width)[None] < 1
        last, padding, padding_p1 = trl.masks(torch.tensor([[EOS, PAD]])[:, :width], PAD)
        rewards = trl.token_rewards(score[None], zeros, zeros, last, padding, 0.2)[0]
        assert trl.gae(rewards, values[:, :width], padding_p1, gamma, lam)[0][
            0, 0
        ].item() == pytest.approx(theirs)
        rewards = F.token_rewards(score[None], zeros, zeros, mask, 0.2)
        advantages, returns = F.gae(rewards, values[:, :width], mask, gamma, lam)
        assert advantages[0].tolist() == pytest.approx([1 - 0.2, 0.0][:width])
        assert returns[0].tolist() == pytest.approx([1.0, 0.0][:width])


def test_advantages_do_not_depend_on_the_width_of_the_batch():
    """The same on random episodes: one column more changes TRL's advantages and returns of the
    longest, and none of ours.
    """
    e = episodes("full")
    w = wider(e)
    for ours, ours_wide in zip(
        F.gae(our_rewards(e), e.values, e.mask, 1.0, 0.9),
        F.gae(our_rewards(w), w.values, w.mask, 1.0, 0.9),
        strict=True,
    ):
        assert_same(ours_wide, torch.nn.functional.pad(ours, (0, 1)))
    for theirs, theirs_wide in zip(
        trl.gae(trl_rewards(e), e.values, e.padding_p1, 1.0, 0.9),
        trl.gae(trl_rewards(w), w.values, w.padding_p1, 1.0, 0.9),
        strict=True,
    ):
        assert ((theirs_wide[:, :-1] - theirs).abs() > 1e-3).all()


def test_critic_learns_before_tokens_only():
    """TRL trains the critic at the step after the last token as well; our episodes have no such
    step, and nothing reads that value.
    """
    values, returns, mask = tensor([0.5, 3.0]), tensor([1.0, 1.0]), torch.tensor([[True, False]])
    _, _, padding_p1 = trl.masks(torch.tensor([[EOS, PAD]]), PAD)
    assert trl.value_loss(values, values, returns, padding_p1, 0.2)[0].item() == pytest.approx(
        0.5 * (0.5**2 + 2**2) / 2
    )
    assert F.masked_mean(
        F.value_loss(values, values, returns, 0.2)[0], mask
    ).item() == pytest.approx(0.5 * 0.5**2)


def test_whitened_values_have_population_variance_one():
    """TRL divides by the unbiased variance: no estimate is wanted here, only a scale. One token is
    NaN there, and 0 here.
    """
    two, one = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    values = tensor([1.0, 3.0])  # mean 2, population variance 1, unbiased 2
    assert_same(
        trl.masked_whiten(values, two), tensor([-(2**-0.5), 2**-0.5]) / (1 + 1e-8 / 2) ** 0.5
    )
    assert_same(F.whiten(values, two), tensor([-1.0, 1.0]) / (1 + 1e-8) ** 0.5)
    assert trl.masked_whiten(values, one)[0, 0].isnan()
    assert F.whiten(values, one).tolist() == [[0.0, 0.0]]


def test_eos_is_a_token_even_where_it_is_the_pad_token():
    """TRL finds a response's end by its first pad token; where that is EOS (a common setting), no
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
    """TRL does not clip: one score that the reward model blew up would rule the whole batch's
    advantages.
    """
    scores, responses = tensor(51.0, -51.0, 1.0), torch.tensor([[5, 6], [5, 6], [5, EOS]])
    assert trl.penalised(scores, responses, EOS, 1.0).tolist() == [50.0, -52.0, 1.0]
    assert shaped(
        scores, torch.tensor([False, False, True]), clip=5.0, missing_eos_penalty=1.0
    ).tolist() == [4.0, -6.0, 1.0]


def test_only_k1_as_a_reward_descends_the_kl():
    """TRL takes k3 for the reward, if told so. Its mean is the KL, but the policy's gradient on it
    is not the KL's, and all but vanishes near the reference, where it should hold the policy. So
    ours rewards k1, and logs k3.
    """
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = (
        reference + 0.1 * torch.randn(6, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )

    # one-token episodes, one for each word of the vocabulary, as often as the policy writes it
    old, ref, zeros, mask = (
        logprobs.detach()[:, None],
        reference[:, None],
        torch.zeros(6),
        torch.ones(6, 1, dtype=torch.bool),
    )
    last, padding, _ = trl.masks(torch.arange(3, 9)[:, None], PAD)

    def policy_gradient(rewards):
        return torch.autograd.grad(
            (old.exp() * rewards * logprobs[:, None]).sum(), logits, retain_graph=True
        )[0]

    assert_same(policy_gradient(F.token_rewards(zeros, old, ref, mask, 0.2)), -0.2 * exact)
    assert_same(
        policy_gradient(trl.token_rewards(zeros, old, ref, last, padding, 0.2, "k1")[0]),
        -0.2 * exact,
    )
    k3 = policy_gradient(trl.token_rewards(zeros, old, ref, last, padding, 0.2, "k3")[0])
    assert k3.norm() < 0.1 * (0.2 * exact).norm()


def test_approximate_kl_is_k3():
    """TRL logs half the squared log-ratio, which is biased; ours, k3, is not."""
    old, new, padding = tensor([0.0]), tensor([0.5]), torch.tensor([[False]])
    assert trl.policy_loss(new, old, old, padding, 0.2)[2].item() == pytest.approx(0.125)
    assert F.kl_k3(old, new).item() == pytest.approx(math.exp(0.5) - 1 - 0.5)


# The trainer's diagnostics and means, on the tiny Llama

PARAMS = PpoParams(
    batch_size=8,
    mini_batch_size=8,
    micro_batch_size=8,
    response_length=16,
    missing_eos_penalty=0.7,
    cliprange=0.05,
)


@pytest.fixture
def step(make_roles, shift):
    """A rollout, its logits, the log-probabilities of a policy that has moved since, and what a
    step says for a size of micro-batches.
    """
    prompts = [({"prompt": ""}, [5 + i, 6, 7][: 1 + i % 3]) for i in range(8)]
    trainer = PpoTrainer(make_roles(lora=LoraParams(r=4, top_layers=1)), prompts, PARAMS, seed=0)
    rollout = trainer.rollout(trainer.sample_prompts())

    @torch.no_grad()
    def logprobs():
        live = trainer.roles.live(
            trainer.packed(rollout.prompts, rollout.responses, range(8)),
            rollout.policy_states,
            rollout.critic_states,
            1.0,
        )
        return live.logprobs, live.logits

    _, logits = logprobs()
    shift(trainer.roles.policy, 0.3)
    shift(trainer.roles.critic, 0.3)
    for learner in trainer.learners:
        learner.optimizer.step = lambda: None

    def told(micro_batch_size):
        trainer.params = PARAMS.model_copy(update={"micro_batch_size": micro_batch_size})
        return trainer.optimiser_step(rollout, list(range(8)), None)

    return SimpleNamespace(rollout=rollout, logits=logits, new=logprobs()[0], told=told)


def test_diagnostics_are_means_over_response_tokens(step):
    """TRL's approxkl and ratio are means over padding too, where they are 0 and 1: the longer the
    batch's longest response is, the calmer the run looks. Ours are the same with padding
    (micro-batches of 8) and without (of 1).
    """
    rollout, pad = step.rollout, torch.nn.functional.pad
    ratios = [math.exp(d) for d in (step.new - rollout.logprobs)[rollout.mask].tolist()]
    tokens, places = len(ratios), rollout.mask.numel()
    assert tokens < places
    for size in (8, 1):
        told = step.told(size)
        assert told["ratio_mean"] == pytest.approx(sum(ratios) / tokens, rel=1e-4)
        assert told["approx_kl"] == pytest.approx(
            sum(r - 1 - math.log(r) for r in ratios) / tokens, rel=1e-3
        )
    for more in (0, 10):
        new, old, advantages = (
            pad(each, (0, more)) for each in (step.new, rollout.logprobs, rollout.advantages)
        )
        _, _, approxkl, ratio = trl.policy_loss(
            new, old, advantages, ~pad(rollout.mask, (0, more)), PARAMS.cliprange
        )
        every = places + more * 8
        assert ratio.item() == pytest.approx((sum(ratios) + every - tokens) / every, rel=1e-4)
        assert approxkl.item() == pytest.approx(
            0.5 * sum(math.log(r) ** 2 for r in ratios) / every, rel=1e-3
        )


def test_entropy_is_a_mean_over_response_tokens(step):
    """TRL's policy/entropy_avg counts what the policy would say behind the end of a response: here
    anything, so entropy looks higher.
    """
    rollout, vocabulary = step.rollout, step.logits.shape[1]
    entropies = scipy_entropy(step.logits.softmax(-1).numpy(), axis=1)
    assert describe(rollout)["entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    for more in (0, 10):
        mask = torch.nn.functional.pad(rollout.mask, (0, more))
        logits = torch.zeros(*mask.shape, vocabulary).masked_scatter(mask[..., None], step.logits)
        outside = mask.numel() - len(entropies)
        expected = (entropies.sum() + outside * math.log(vocabulary)) / mask.numel()
        assert trl.entropy(logits).mean().item() == pytest.approx(expected, rel=1e-4)
        assert expected > entropies.mean() + 0.1


def test_a_loss_is_the_mean_over_the_mini_batchs_tokens(step):
    """TRL takes the mean of each micro-batch and then of these, so a token of a short response
    weighs more, and how a mini-batch is cut for memory's sake changes what is learnt.
    """
    rollout = step.rollout
    pieces = [
        trl.policy_loss(
            step.new[rows],
            rollout.logprobs[rows],
            rollout.advantages[rows],
            ~rollout.mask[rows],
            PARAMS.cliprange,
        )[0].item()
        for size in (8, 1)
        for rows in torch.arange(8).split(size)
    ]
    whole, cut = pieces[0], sum(pieces[1:]) / 8
    assert step.told(8)["policy_loss"] == pytest.approx(whole, abs=1e-5)
    assert step.told(1)["policy_loss"] == pytest.approx(whole, abs=1e-5)
    assert abs(cut - whole) > 0.01
