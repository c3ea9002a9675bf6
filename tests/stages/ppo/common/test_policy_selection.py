"""The selected policy: the judge's best within the KL budget, on held-out prompts."""

import pytest
import torch

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.core.types import ScoreFunction
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.ppo.common.policy_selection import PolicySelector
from tests.stages.judges import LongerWins


def by_score(score: ScoreFunction) -> PrimaryJudge:
    return PrimaryJudge("mine", PointwiseJudge("mine", score, 0.0))


@pytest.fixture
def selector(make_roles) -> PolicySelector:
    """Its judge likes long texts."""
    prompts = [({"prompt": str(i)}, [5 + i, 6]) for i in range(24)]
    params = PpoParams(response_length=6, max_kl_per_token=0.2)
    return PolicySelector(
        make_roles(lora=LoraParams(r=4)),
        prompts,
        by_score(lambda _, texts: [float(len(text)) for text in texts]),
        params,
        seed=0,
    )


def trained_weights(selector: PolicySelector) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in selector.roles.policy.named_parameters()
        if p.requires_grad
    }


def validate_policies(
    selector: PolicySelector, shift, policies: list[tuple[float, float]]
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Validate policies, each given by how far its weights are shifted from the one before, and by
    its judge score; returns their KL and weights.
    """
    kls, weights = [], []
    for update, (distance, score) in enumerate(policies):
        shift(selector.roles.policy, distance)
        weights.append(trained_weights(selector))
        selector.judge = by_score(lambda prompts, _, score=score: [score] * len(prompts))
        kls.append(selector.validate(update).kl)
    return kls, weights


def test_the_judges_best_within_the_budget_is_kept_and_restored(selector, shift):
    kls, weights = validate_policies(
        selector, shift, [(0.0, 0.2), (0.01, 0.5), (0.002, 0.4), (0.1, 0.9)]
    )
    assert max(kls[:3]) <= 1.0 < kls[3]
    best = selector.best
    assert (best.update, best.judge_score, best.kl, best.gain) == (
        1,
        0.5,
        kls[1],
        pytest.approx(0.3),
    )
    selector.restore()
    restored = trained_weights(selector)
    assert all(torch.equal(weight, weights[1][name]) for name, weight in restored.items())


def test_if_none_is_within_the_budget_the_nearest_is_kept(selector, shift):
    kls, _ = validate_policies(selector, shift, [(0.03, 0.1), (0.05, 0.9)])
    assert 1.0 < kls[0] < kls[1]
    assert selector.best.update == 0


def test_the_budget_holds_for_a_kl_of_one_standard_error_more(selector, shift):
    shift(selector.roles.policy, 0.01)
    far = selector.measure(0)
    assert far.kl_per_token_se > 0
    middle = far.kl_per_token + far.kl_per_token_se / 2
    for budget, update in ((middle, 0), (middle + far.kl_per_token_se, 1)):
        selector.params = selector.params.model_copy(update={"max_kl_per_token": budget})
        selector.best = far._replace(kl_per_token=0.0, kl_per_token_se=0.0)
        better = far._replace(update=1, judge_scores=tuple(s + 1 for s in far.judge_scores))
        assert (1 if selector.is_better(better) else 0) == update


def test_a_gain_within_its_standard_error_keeps_the_earlier_policy(selector, shift):
    """24 gains with the mean 0.1: half are 0.6 and half -0.4, so their error is 0.104; and half are
    0.59 and half -0.39, error 0.102; the others are 0.5 and -0.3, error 0.083.
    """
    for update, (high, low, best) in enumerate(
        [(0.0, 0.0, 0), (0.6, -0.4, 0), (0.59, -0.39, 0), (0.5, -0.3, 3)]
    ):
        scores = [high, low] * 12
        selector.judge = by_score(lambda *_, scores=scores: scores)
        validation = selector.validate(update)
        assert selector.best.update == best
    assert (validation.gain, validation.gain_error) == pytest.approx((0.1, 0.0834), abs=1e-4)
    assert validation.metrics["validation_gain_z"] == pytest.approx(1.199, abs=1e-3)


def test_of_equal_policies_the_first_is_kept(selector, shift):
    validate_policies(selector, shift, [(0.0, 0.5), (0.01, 0.5)])
    assert selector.best.update == 0


def test_a_judge_that_only_compares_sees_each_policy_beside_sft(selector, shift):
    judge = LongerWins()
    selector.judge = PrimaryJudge("longer", judge)
    first = selector.validate(0)
    assert first.judge_scores == (0.5,) * 24 and judge.shown == []  # SFT against itself
    shift(selector.roles.policy, 0.1)
    second = selector.measure(1)
    sft = selector.first_texts
    assert {b for a, b in judge.shown[::2]} <= set(sft) and judge.shown
    expected = [
        1.0 if a > b else 0.0 if a < b else 0.5
        for a, b in zip(judged_lengths(selector, judge), map(len, sft), strict=True)
    ]
    assert list(second.judge_scores) == expected
    assert second.gain == pytest.approx(sum(expected) / 24 - 0.5)


def judged_lengths(selector: PolicySelector, judge: LongerWins) -> list[int]:
    """The lengths of the policy's texts; a text that equals SFT's was not shown."""
    shown = iter(judge.shown[::2])
    pair = next(shown, None)
    lengths = []
    for text in selector.first_texts:
        if pair and pair[1] == text:
            lengths.append(len(pair[0]))
            pair = next(shown, None)
        else:
            lengths.append(len(text))
    return lengths


def test_a_resumed_run_remembers_the_best(selector, shift, make_roles):
    validate_policies(selector, shift, [(0.0, 0.2), (0.01, 0.5), (0.002, 0.4)])
    resumed = PolicySelector(
        make_roles(lora=LoraParams(r=4)),
        selector.prompts,
        selector.judge,
        selector.params,
        selector.seed,
    )
    resumed.load_state(selector.state())
    selector.restore()
    resumed.restore()
    assert resumed.best == selector.best
    assert resumed.first_texts == selector.first_texts != []
    assert resumed.first == selector.first
    assert resumed.first.judge_scores == (0.2,) * 24
    weights = trained_weights(selector)
    assert all(
        torch.equal(weight, weights[name]) for name, weight in trained_weights(resumed).items()
    )


def test_measurements_are_reproducible_and_kl_is_zero_before_training(selector):
    first, second = selector.measure(0), selector.measure(0)
    assert first == second
    # later policies get the same random numbers
    assert selector.measure(7) == first._replace(update=7)
    assert first.kl == 0.0
    assert first.judge_score > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_is_that_of_transformers_logits(selector, shift, temperature):
    selector.params = selector.params.model_copy(update={"temperature": temperature})
    policy = selector.roles.policy
    shift(policy, 0.1)
    judged_texts = []
    selector.judge = by_score(lambda _, texts: [judged_texts.append(t) or 0.0 for t in texts])
    validation, kls = selector.measure(0), []

    @torch.no_grad()
    def logprobs(ids):
        logits = policy(input_ids=ids).logits[0, 1:-1]  # prompts have two tokens
        return (logits / temperature).log_softmax(-1)

    for (_, prompt), text in zip(selector.prompts, judged_texts, strict=True):
        response = [int(token) for token in text.split()]
        ids = torch.tensor([prompt + response])
        p = logprobs(ids)
        with policy.disable_adapter():
            kls.append(float((p.exp() * (p - logprobs(ids))).sum()))
    assert validation.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert validation.kl > 0.01
