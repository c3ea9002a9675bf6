"""The selected policy: scaled to the target KL, or the judge's best update within the budget."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.lib.core.params.policy import PolicySelection, PpoParams
from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.core.progress import reporting
from stages.lib.core.types import ScoreFunction
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.interpolation import MAX_SCALE, MAX_SCALED
from stages.ppo.common.health import KL_ABOVE_BUDGET
from stages.ppo.common.policy_selection import (
    SCALING_SAMPLES,
    Candidate,
    PolicySelector,
    keeps_earlier,
)
from stages.ppo.trainer.roles import Roles
from tests.stages.judges import LongerWins

NOWHERE = Path("no-checkpoints")


def by_score(score: ScoreFunction) -> PrimaryJudge:
    return PrimaryJudge("mine", PointwiseJudge("mine", score, 0.0))


@pytest.fixture
def selector(make_roles) -> PolicySelector:
    """Its judge likes long texts."""
    return make_selector(make_roles(lora=LoraParams(r=4)))


def make_selector(roles: Roles, prompts: int = 24) -> PolicySelector:
    return PolicySelector(
        roles,
        [({"prompt": str(i)}, [5 + i, 6]) for i in range(prompts)],
        by_score(lambda _, texts: [float(len(text)) for text in texts]),
        PpoParams(
            response_length=6, max_kl_per_token=0.2, policy_selection=PolicySelection.best_update
        ),
        seed=0,
    )


def select(selector: PolicySelector, update: int, danger: str = "", folder: Path = NOWHERE):
    return selector.select(update, danger, folder, ModelParams())


def rescore_best(selector: PolicySelector, scores: tuple[float, ...]) -> None:
    """Give the best policy so far other judge scores."""
    rescored = selector.best._replace(judge_scores=scores)
    selector.candidates = [
        candidate._replace(validation=rescored)
        if candidate.validation == selector.best
        else candidate
        for candidate in selector.candidates
    ]
    selector.best = rescored


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
    assert select(selector, 3) == best
    restored = trained_weights(selector)
    assert all(torch.equal(weight, weights[1][name]) for name, weight in restored.items())
    assert [one.update for one in selector.history] == [0, 1, 2, 3]


def test_the_budget_holds_for_a_kl_of_one_standard_error_more(selector):
    """The budget is 0.2."""
    sft = selector.measure(0)
    better = sft._replace(update=1, judge_scores=tuple(s + 1 for s in sft.judge_scores))
    for kl, error, is_better in ((0.18, 0.01, True), (0.17, 0.05, False), (0.3, 0.0, False)):
        new = better._replace(kl_per_token=kl, kl_per_token_se=error)
        assert selector.is_better(new, sft) is is_better


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
    resumed = make_selector(make_roles(lora=LoraParams(r=4)))
    resumed.load_state(selector.state())
    assert select(selector, 2) == select(resumed, 2)
    assert resumed.first_texts == selector.first_texts != []
    assert resumed.history == selector.history and len(resumed.history) == 3
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
    assert selector.measure(7, 0.5) == first._replace(update=7, scale=0.5)
    assert first.kl == 0.0
    assert first.judge_score > 0


@pytest.mark.parametrize(("temperature", "samples"), [(1.0, 1), (0.6, 1), (1.0, 3)])
def test_kl_is_that_of_transformers_logits(selector, shift, monkeypatch, temperature, samples):
    """Of all samples; the judge scores the first one, and the error is over prompts."""
    selector.params = selector.params.model_copy(update={"temperature": temperature})
    sft = selector.measure(0)
    policy, sample, sampled = selector.roles.policy, selector.roles.sample, []
    shift(policy, 0.1)
    monkeypatch.setattr(
        selector.roles, "sample", lambda *args: sampled.append(sample(*args)) or sampled[-1]
    )
    judged_texts = []
    selector.judge = by_score(lambda _, texts: [judged_texts.append(t) or 0.0 for t in texts])
    validation, kls = selector.measure(0, samples=samples), []

    @torch.no_grad()
    def logprobs(ids):
        logits = policy(input_ids=ids).logits[0, 1:-1]  # prompts have two tokens
        return (logits / temperature).log_softmax(-1)

    for (_, prompt), *responses in zip(selector.prompts, *sampled, strict=True):
        kls.append([])
        for response in responses:
            ids = torch.tensor([prompt + response.tokens])
            p = logprobs(ids)
            with policy.disable_adapter():
                kls[-1].append(float((p.exp() * (p - logprobs(ids))).sum()))
    assert [len(kl) for kl in kls] == [samples] * 24
    assert judged_texts == selector.roles.tokenizer.batch_decode(
        [response.tokens for response in sampled[0]], skip_special_tokens=True
    )
    assert validation.kl == pytest.approx(np.mean(kls), rel=1e-3)
    error = np.std(np.mean(kls, axis=1), ddof=1) / 24**0.5 / sft.length
    assert validation.kl_per_token_se == pytest.approx(error, rel=1e-2)
    assert validation.kl > 0.01
    if samples > 1:  # the first one has the random numbers of a validation with one
        assert sampled[0] != sampled[1]
        selector.measure(0)
        assert sampled[-1] == sampled[0]


def test_the_length_of_sft_is_that_of_several_responses_per_prompt(selector, monkeypatch):
    sample, sampled = selector.roles.sample, []
    monkeypatch.setattr(
        selector.roles, "sample", lambda *args: sampled.append(sample(*args)) or sampled[-1]
    )
    selector.validate(0)
    assert len(sampled) == SCALING_SAMPLES
    lengths = [[len(response.tokens) for response in responses] for responses in sampled]
    assert selector.first.length == pytest.approx(np.mean(lengths))
    assert selector.first.length != pytest.approx(np.mean(lengths[0]))
    selector.validate(1)  # a later policy has one
    assert len(sampled) == SCALING_SAMPLES + 1


TARGET = 0.15  # nats per token; shifted by 0.02, the policy has more than twice as much


@pytest.fixture
def to_target(make_roles, shift):
    """A selector after SFT and one update, which moved the weights by `distance`. Its judge gives
    the n-th validation the n-th of `scores`, then the last one.
    """

    def make(distance: float, scores: list[float], r: int = 4, target: float = TARGET, prompts=24):
        selector = make_selector(make_roles(lora=LoraParams(r=r)), prompts)
        selector.params = selector.params.model_copy(
            update={
                "policy_selection": PolicySelection.target_kl,
                "target_kl_per_token": target,
                "max_kl_per_token": 10 * target,
            }
        )
        rest = list(scores)
        selector.judge = by_score(
            lambda prompts, _: [rest.pop(0) if len(rest) > 1 else rest[0]] * len(prompts)
        )
        # each score is one number for all prompts, so no gain has an error
        selector.validate(0)
        shift(selector.roles.policy, distance)
        selector.validate(1)
        return selector

    return make


def test_a_target_above_the_budget_is_refused_unless_nothing_is_scaled_to_it():
    with pytest.raises(
        ValueError, match=r"target_kl_per_token 0\.6 is above max_kl_per_token 0\.5"
    ):
        PpoParams(target_kl_per_token=0.6, max_kl_per_token=0.5)
    assert PpoParams(target_kl_per_token=0.6, max_kl_per_token=0.5, policy_selection="best_update")


@pytest.mark.parametrize("r", [4, 0], ids=["adapters", "all weights"])
def test_the_trained_policy_is_scaled_to_the_target_kl(to_target, r):
    selector = to_target({4: 0.02, 0: 0.03}[r], [0.1, 0.5], r)
    trained, [_, before] = trained_weights(selector), list(selector.history)
    assert before.kl_per_token > 1.5 * TARGET
    selected = select(selector, 1)
    assert selected.update == 1 and selected.scale < 0.9
    assert abs(selected.kl_per_token - TARGET) < 0.2 * TARGET
    assert selected == selector.history[-1] and len(selector.history) <= 2 + MAX_SCALED
    # what is selected is what was validated
    again = selector.measure(1, selected.scale, SCALING_SAMPLES)
    assert again == selected
    kept = trained_weights(selector)
    assert any(not torch.equal(weight, kept[name]) for name, weight in trained.items())
    assert selector.metrics["policy_scale"] == selected.scale
    assert [one["scale"] for one in selector.metrics["validations"]][:3] == [
        1.0,
        1.0,
        selector.history[2].scale,
    ]
    # less than 0.5 if a response is SFT's, whose score is known
    assert 0.45 < selected.judge_score < 0.51
    described, score = selector.describe(), f"0.10 -> {selected.judge_score:.2f}"
    assert f"after update 1, scaled by {selected.scale:.2f}: mine {score}" in described
    assert described.endswith("nats per sequence")


def test_the_lines_of_scaled_policies_say_how_many_there_may_be(to_target):
    lines: list[str] = []
    selector = to_target(0.02, [0.1, 0.5])
    with reporting("ppo@r0", lines.append, quiet=0):
        select(selector, 1)
    numbers = {int(n) for line in lines for n in re.findall(r"policy (\d) of 5 at most", line)}
    assert numbers == set(range(1, len(selector.history) - 1))


def test_a_policy_that_moved_too_little_is_scaled_up_but_not_far(to_target):
    selector = to_target(0.005, [0.1, 0.5])
    assert select(selector, 1).scale == MAX_SCALE
    assert [one.scale for one in selector.history] == [1.0, 1.0, MAX_SCALE]
    target = TARGET * selector.first.length
    assert f"nats per sequence. The target, {target:.2f}, is too far" in selector.describe()


def test_several_responses_per_prompt_decide_the_scale(to_target):
    """The target is the KL by one response per prompt: by several, it is another."""
    selector = to_target(0.02, [0.1, 0.5], prompts=6)
    one, several = selector.history[1], selector.measure(1, samples=SCALING_SAMPLES)
    assert several.kl_per_token != pytest.approx(one.kl_per_token, rel=0.03)
    selector = to_target(0.02, [0.1, 0.5], target=one.kl_per_token, prompts=6)
    selected = select(selector, 1)
    assert selector.history[2] == several  # by one response per prompt, it is at the target
    assert selected.kl_per_token == pytest.approx(one.kl_per_token, rel=0.02)
    assert (selected.scale < 1) == (several.kl_per_token > one.kl_per_token)


def test_an_earlier_policy_is_kept_if_it_is_better_at_a_smaller_kl(to_target):
    """The judge likes SFT best, then the trained policy, which has a larger KL than the scaled."""
    selector = to_target(0.02, [0.9, 0.8, 0.1])
    assert select(selector, 1) == selector.history[0]
    assert "too far" not in selector.describe()
    assert all(
        torch.equal(w, torch.zeros_like(w))
        for name, w in trained_weights(selector).items()
        if "lora_B" in name
    )
    selector = to_target(0.02, [0.0, 0.8, 0.1])
    assert selector.best.update == 1 and selector.best.scale == 1
    assert select(selector, 1).scale < 1


@pytest.mark.parametrize(("high", "low", "update"), [(0.35, -0.15, 1), (0.33, -0.13, 0)])
def test_an_earlier_policy_needs_two_standard_errors(to_target, high, low, update):
    """24 gains with the mean 0.1 and the errors 0.0521 and 0.0480, which is 1.92 and 2.09 times."""
    selector = to_target(0.02, [0.9, 0.8])
    rescore_best(selector, (0.1 + high, 0.1 + low) * 12)
    selector.judge = by_score(lambda prompts, _: [0.1] * len(prompts))
    assert select(selector, 1).update == update


@pytest.mark.parametrize(
    ("kl", "error", "kept"),
    [
        (0.04, 0.049, True),  # more than two standard errors
        (0.1, 0.049, True),
        (0.105, 0.049, True),  # at the limit it counts as the same KL
        (0.106, 0.01, False),  # more KL
        (0.04, 0.051, False),
        (0.1, 0.051, False),
    ],
)
def test_an_earlier_policy_has_at_most_as_much_kl_and_two_standard_errors_more(
    to_target, kl, error, kept
):
    """The gain is 0.1 in the mean of two prompts, which lie `error` above and below."""
    _, one = to_target(0.02, [0.1]).history
    scaled = one._replace(judge_scores=(0.0, 0.0), kl_per_token=0.1)
    earlier = one._replace(judge_scores=(0.1 + error, 0.1 - error), kl_per_token=kl)
    assert keeps_earlier(earlier, scaled, 0.1) == kept


def test_a_gain_of_just_two_standard_errors_is_not_clear(to_target):
    """Numbers that floats hold exactly: gains of 0.25 and 0.75, which have an error of 0.25."""
    _, one = to_target(0.02, [0.1]).history
    scaled = one._replace(judge_scores=(0.0, 0.0), kl_per_token=1.0)
    for gain, kept in ((0.5, False), (0.75, True)):
        scores = (gain + 0.25, gain - 0.25)
        earlier = one._replace(judge_scores=scores, kl_per_token=0.5)
        assert keeps_earlier(earlier, scaled, 1.0) == kept


@pytest.mark.parametrize(("kl", "kept"), [(2.0, (True, False)), (0.0, (False, False))])
def test_the_champion_is_kept_unless_training_has_gained_a_standard_error(to_target, kl, kept):
    """Gains of the trained policy of 0.125 and 0.375, which have an error of 0.25. SFT, the other
    policy of update 0, has no KL and no such right.
    """
    _, one = to_target(0.02, [0.1]).history
    start = one._replace(update=0, judge_scores=(0.0, 0.0), kl=kl, kl_per_token=kl / 4)
    for gain, start_is_kept in zip((0.125, 0.375), kept, strict=True):
        scaled = one._replace(judge_scores=(gain + 0.25, gain - 0.25), kl_per_token=1.0)
        assert keeps_earlier(start, scaled, 1.0) == start_is_kept


@pytest.mark.parametrize(("kl", "kept"), [(0.1, True), (0.105, True), (0.106, False), (0.04, True)])
def test_an_earlier_policy_at_the_target_is_kept_if_the_scaled_one_misses_it(to_target, kl, kept):
    """The target is 0.1, and the scaled policy has 0.07; the gain is 0.1, more than twice its
    error, 0.04.
    """
    _, one = to_target(0.02, [0.1]).history
    scaled = one._replace(judge_scores=(0.0, 0.0), kl_per_token=0.07)
    earlier = one._replace(judge_scores=(0.14, 0.06), kl_per_token=kl)
    assert keeps_earlier(earlier, scaled, 0.1) == kept


def test_the_reference_is_measured_whatever_the_policy_is(selector, shift):
    before = selector.validate(0)
    shift(selector.roles.policy, 0.02)
    moved = trained_weights(selector)
    again = selector.validate_reference()
    assert again == before._replace(length=again.length) and again.kl == 0.0
    weights = trained_weights(selector)
    assert all(torch.equal(weight, weights[name]) for name, weight in moved.items())


def test_a_policy_that_was_not_scaled_is_described_without_a_scale(selector, shift):
    validate_policies(selector, shift, [(0.0, 0.2), (0.01, 0.5)])
    select(selector, 1)
    kl = f"KL {selector.best.kl:.2f} nats per sequence"
    words = f"kept the policy after update 1: mine 0.20 -> 0.50 on held-out prompts, {kl}"
    assert selector.describe() == words


def test_the_setting_that_makes_the_training_longer_is_named(to_target):
    selector = to_target(0.005, [0.1, 0.5])
    select(selector, 1)
    assert "raise ppo.total_episodes, or lower" in selector.describe()
    assert "raise ppo.dpo.epochs, or lower" in selector.describe("ppo.dpo.epochs")


def test_the_champion_is_kept_if_the_trained_policy_is_worse_at_the_same_kl(to_target):
    """Update 1 is the champion, at the target KL; update 2, made from it, has the score 0.5."""
    at = to_target(0.02, [0.1, 0.5]).history[1].kl_per_token
    for champions, update in ((0.6, 1), (0.4, 2)):
        selector = to_target(0.02, [0.1, 0.5], target=at)
        rescore_best(selector, (champions,) * 24)
        assert select(selector, 2).update == update


def test_an_earlier_policy_with_a_larger_kl_is_not_kept(to_target):
    selector = to_target(0.02, [0.0, 0.8, 0.1])
    assert selector.best.update == 1 and selector.best.kl_per_token > 1.5 * TARGET
    selected = select(selector, 2)
    assert selected.update == 2 and selected.scale < 1


def test_the_last_update_is_scaled_up_whatever_the_judge_prefers(to_target):
    at = to_target(0.02, [0.1, 0.5]).history[1].kl_per_token
    selector = to_target(0.02, [0.0, 0.8, 0.1], target=1.2 * at)
    selected = select(selector, 1)
    assert selected.scale > 1.05 and selected.judge_score < selector.history[1].judge_score


@pytest.mark.parametrize(
    ("danger", "scaled"), [("", True), (KL_ABOVE_BUDGET, True), ("mode collapse", False)]
)
def test_only_a_kl_that_is_too_large_is_mended_by_scaling(to_target, danger, scaled):
    """After a danger the last update is not validated: it is, before it is scaled."""
    selector = to_target(0.02, [0.1, 0.5])
    selected = select(selector, 2, danger)
    assert (selected.update, selected.scale < 1) == ((2, True) if scaled else (1, False))
    points = [(one.update, one.scale) for one in selector.history]
    assert points[:2] == [(0, 1.0), (1, 1.0)] and (points[2:3] == [(2, 1.0)]) == scaled


@pytest.mark.parametrize("last", ["further", "back"])
def test_an_earlier_policy_at_the_target_is_kept_although_a_later_one_was_the_best(
    to_target, shift, last
):
    """Judge scores: SFT 0.1; the champion 0.79 at the target KL; update 2 0.84 with more KL, which
    is the best within the budget; update 3 0.83; update 3, scaled to the target, 0.72. Update 3
    has nearly the champion's weights once more, or more KL than update 2.
    """
    at = to_target(0.02, [0.1, 0.5]).history[1].kl_per_token
    selector = to_target(0.02, [0.1, 0.79, 0.84, 0.83, 0.72], target=at)
    champion, weights = selector.history[1], trained_weights(selector)
    for update, distance in ((2, 0.005), (3, {"further": 0.005, "back": -0.0045}[last])):
        shift(selector.roles.policy, distance)
        selector.validate(update)
    assert selector.best.update == 2 and selector.best.kl_per_token > 1.1 * at
    assert len(selector.candidates) == 2  # the champion and the last update
    resumed_state = selector.state()
    assert select(selector, 3) == champion
    restored = trained_weights(selector)
    assert all(torch.equal(weight, weights[name]) for name, weight in restored.items())
    # a resumed run has the champion's weights, too
    selector.load_state(resumed_state)
    shift(selector.roles.policy, 0.01)
    assert select(selector, 3) == champion
    again = trained_weights(selector)
    assert all(torch.equal(weight, weights[name]) for name, weight in again.items())


def test_of_policies_at_most_at_the_target_the_judges_best_is_kept(selector):
    """The target is 0.45, so up to 0.4725 counts as the target. The champion stays beside it."""
    selector.params = PpoParams()
    one = selector.validate(0)
    selector.candidates = [
        Candidate(one._replace(update=u, kl_per_token=kl, judge_scores=(score,)), {})
        for u, kl, score in [
            (1, 0.2, 0.3),
            (6, 0.48, 0.9),
            (2, 0.42, 0.4),
            (3, 0.43, 0.5),
            (4, 0.47, 0.6),
            (5, 0.46, 0.6),
            (7, 0.1, 0.35),
        ]
    ]
    assert [candidate.validation.update for candidate in selector.preferred()] == [4]
    start = Candidate(one._replace(kl=5.0, kl_per_token=0.4, judge_scores=(0.1,)), {})
    selector.candidates = [start, *selector.candidates]
    assert [candidate.validation.update for candidate in selector.preferred()] == [0, 4]
    too_far = start.validation._replace(kl_per_token=0.6)
    selector.candidates[0] = Candidate(too_far, {})
    assert [candidate.validation.update for candidate in selector.preferred()] == [4]


@pytest.mark.parametrize(
    ("r", "last", "validated", "selected"),
    [(4, 14, [3, 10], 10), (0, 11, [3], 3), (4, 4, [4], 4), (4, 13, [], 0)],
)
def test_a_danger_before_the_first_validation_leaves_the_checkpoints_before_it(
    make_roles, shift, tmp_path, r, last, validated, selected
):
    """The danger of update 11 was seen in a rollout of the checkpoint 10. Without a checkpoint
    before the danger, the last policy is validated. The judge likes every policy better than the
    one before; in the last case, in which none was saved, all alike.
    """
    selector = make_selector(make_roles(lora=LoraParams(r=r)))
    selector.params = PpoParams(response_length=6, max_kl_per_token=1e3, lora=LoraParams(r=r))
    rest = [0.9] if not validated else [0.1, 0.2, 0.3]
    selector.judge = by_score(
        lambda prompts, _: [rest.pop(0) if len(rest) > 1 else rest[0]] * len(prompts)
    )
    selector.validate(0)
    weights = {}
    for update in (3, 10, last):
        shift(selector.roles.policy, 0.01)
        weights[update] = trained_weights(selector)
        if validated and update < last:
            selector.roles.policy.save_pretrained(tmp_path / f"step_{update:05d}")
    sft = selector.history[0]
    kept = select(selector, last, "mode collapse", tmp_path)
    assert [one.update for one in selector.history[1:]] == (validated or [last])
    assert kept.update == selected and (selected or kept == sft)
    if selected:
        restored = trained_weights(selector)
        assert all(torch.equal(w, weights[selected][name]) for name, w in restored.items())
