"""Retests of badcases: what counts as failing, and the state that follows."""

import pytest

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, State
from stages.replay.mining import BadcaseThresholds, PolicySample
from stages.replay.retest import comparison_response, count_by_cause, retest, still_fails

LIMITS = BadcaseThresholds(ReplayParams(), kl=10.0, lexicon=True)


def case(cause: str, **changes) -> Badcase:
    row = {"id": cause, "round": "r0", "cause": cause, "state": "replayed", "origin": "fresh"}
    row |= {"prompt_id": "p", "prompt": "The dinner", "response": " was bad.", "score": 0.0}
    row |= {"sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    return Badcase.model_validate(row | {"exploits": [" Enjoy!"], "sft": " was good."} | changes)


def again(
    response: str, score: float = 0.0, kl: float = 1.0, ended: bool = True, **more
) -> PolicySample:
    return PolicySample("p", "The dinner", response, score, kl, ended, "again", **more)


def voted(vote: float) -> PolicySample:
    return again(" was ok.", rival=" was good.", votes={JURY: vote})


EXPLOITING = {"exploits": (" Enjoy!",), "stripped_score": 0.0}


@pytest.mark.parametrize(
    ("badcase", "sample", "fails"),
    [
        (case("no_eos"), again(" was ok."), False),
        (case("no_eos"), again(" was and", ended=False), True),
        (case("kl_outlier"), again(" was ok.", kl=11.0), True),
        (case("blind_spot"), again(" was. Enjoy!", 2.0, **EXPLOITING), True),
        (case("blind_spot"), again(" was. Enjoy!", 0.0, **EXPLOITING), False),
        (case("judge_loses"), voted(0.0), True),
        (case("judge_loses"), voted(0.5), False),
        (case("human", better=" was good."), voted(0.0), True),
        # as good as the better answer that the person gave
        (case("human", better=" was good."), voted(0.5), False),
        (case("human"), voted(0.5), True),  # no better than the reported response
        (case("human"), voted(1.0), False),
    ],
)
def test_what_counts_as_failing_again(badcase, sample, fails):
    assert still_fails(badcase, sample, LIMITS) == fails


def test_what_a_new_response_is_compared_with():
    assert comparison_response(case("judge_loses")) == " was good."
    assert comparison_response(case("human", better=" was late.")) == " was late."
    assert comparison_response(case("human")) == " was bad."
    assert comparison_response(case("no_eos")) is None  # the jury is not needed


def test_the_retest_is_recorded_and_the_state_follows():
    good, bad = again(" was ok."), again(" was and", ended=False)
    cases = [case("no_eos", id=str(number)) for number in range(3)]
    samples = [[good, good], [good, bad], [good, good]]
    retested = retest(cases, samples, [True, True, False], LIMITS, "r1")
    assert [badcase.state for badcase in retested] == [State.repaired, State.open, State.open]
    results = [result for badcase in retested for result in badcase.tries]
    assert [(result.round, result.fired, result.of, result.ranked) for result in results] == [
        ("r1", 0, 2, True),
        ("r1", 1, 2, True),
        ("r1", 0, 2, False),  # the reward model still prefers the bad answer
    ]
    assert count_by_cause(retested, State.repaired) == {Cause.no_eos.value: 1}
