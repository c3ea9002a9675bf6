"""Which policy is kept: the judge's choice within the KL budget, on prompts that are held out."""

import pytest
import torch

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.ppo.common.policy_selection import PolicySelector


@pytest.fixture
def best(make_roles) -> PolicySelector:
    prompts = [({"prompt": str(i)}, [5 + i, 6]) for i in range(24)]
    length = PpoParams(response_length=6, max_kl=1.0)
    return PolicySelector(
        make_roles(lora=LoraParams(r=4)),
        prompts,
        lambda _, texts: [float(len(text)) for text in texts],
        length,
        seed=0,
    )


def weights(best: PolicySelector) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in best.roles.policy.named_parameters()
        if p.requires_grad
    }


def look(
    best: PolicySelector, shift, verdicts: list[tuple[float, float]]
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Validate policies that each are moved `by` further, of which the judge says `judged`; their
    KL and weights.
    """
    kls, seen = [], []
    for update, (by, judged) in enumerate(verdicts):
        shift(best.roles.policy, by)
        seen.append(weights(best))
        best.judge = lambda prompts, _, judged=judged: [judged] * len(prompts)
        kls.append(best.validate(update).kl)
    return kls, seen


def test_the_judges_choice_within_the_budget_is_kept_and_had_back(best, shift):
    kls, seen = look(best, shift, [(0.0, 0.2), (0.01, 0.5), (0.002, 0.4), (0.1, 0.9)])
    assert max(kls[:3]) <= 1.0 < kls[3]
    assert best.found == (1, 0.5, kls[1])
    best.restore()
    assert all(torch.equal(value, seen[1][name]) for name, value in weights(best).items())


def test_where_none_is_within_the_budget_the_nearest_is_kept(best, shift):
    kls, _ = look(best, shift, [(0.03, 0.1), (0.05, 0.9)])
    assert 1.0 < kls[0] < kls[1]
    assert best.found.update == 0


def test_of_a_killed_run_the_best_is_remembered(best, shift, make_roles):
    look(best, shift, [(0.0, 0.2), (0.01, 0.5), (0.002, 0.4)])
    again = PolicySelector(
        make_roles(lora=LoraParams(r=4)), best.prompts, best.judge, best.params, best.seed
    )
    again.load_state(best.state())
    best.restore(), again.restore()
    assert again.found == best.found
    assert all(torch.equal(value, weights(best)[name]) for name, value in weights(again).items())


def test_measured_alike_twice_and_at_kl_zero_before_anything_is_learnt(best):
    first, second = best.measure(0), best.measure(0)
    assert first == second
    assert first.kl == 0.0
    assert first.judge > 0


def test_kl_is_that_of_transformers_logits(best, shift):
    shift(best.roles.policy, 0.1)
    seen = []
    best.judge = lambda _, texts: [seen.append(text) or 0.0 for text in texts]
    measured, kls = best.measure(0), []
    for (_, prompt), text in zip(best.prompts, seen, strict=True):
        response = [int(token) for token in text.split()]
        ids = torch.tensor([prompt + response])

        def logprob(ids=ids):
            logprobs = (
                best.roles.policy(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
            )  # prompts have two tokens
            return float(logprobs.gather(1, ids[0, 2:, None]).sum())

        with torch.no_grad():
            own = logprob()
            with best.roles.policy.disable_adapter():
                kls.append(own - logprob())
    assert measured.kl == pytest.approx(sum(kls) / len(kls), abs=1e-4) and abs(measured.kl) > 0.01
