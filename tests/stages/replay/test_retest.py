"""A badcase tried again: what counts as failing, and what it becomes."""

import pytest

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.judging.lexicon import lexicon_scores
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, State
from stages.replay.mining import BadcaseThresholds, PolicySample
from stages.replay.retest import by_cause, comparison_response, retest, still_fails

LIMITS = BadcaseThresholds(ReplayParams(), kl=10.0, lexicon=True)


def case(cause: str, **more) -> Badcase:
    row = {
        "id": cause,
        "round": "r0",
        "cause": cause,
        "prompt_id": "p",
        "prompt": "The dinner",
        "response": " was bad.",
    }
    numbers = {
        "origin": "fresh",
        "score": 0.0,
        "sentiment": 0.0,
        "sentiment_plain": 0.0,
        "repetition": 0.0,
    }
    return Badcase.model_validate(
        row | numbers | {"state": "replayed", "exploits": [" Enjoy!"], "sft": " was good."} | more
    )


def again(
    response: str, score: float = 0.0, kl: float = 1.0, ended: bool = True, **more
) -> PolicySample:
    judged = lexicon_scores(["The dinner"], [response])[0]
    return PolicySample("p", "The dinner", response, score, kl, ended, judged, "again", **more)


def voted(vote: float) -> PolicySample:
    return again(" was ok.", rival=" was good.", votes={JURY: vote})


@pytest.mark.parametrize(
    ("failed", "answer", "fails"),
    [
        (case("no_eos"), again(" was ok."), False),
        (case("no_eos"), again(" was and", ended=False), True),
        (case("kl_outlier"), again(" was ok.", kl=11.0), True),
        (case("blind_spot"), again(" was. Enjoy!", 2.0, exploits=(" Enjoy!",), bare=0.0), True),
        (case("blind_spot"), again(" was. Enjoy!", 0.0, exploits=(" Enjoy!",), bare=0.0), False),
        (case("judge_loses"), voted(0.0), True),
        (case("judge_loses"), voted(0.5), False),
        (case("human", better=" was good."), voted(0.0), True),
        (
            case("human", better=" was good."),
            voted(0.5),
            False,
        ),  # as good as what the person wanted
        (case("human"), voted(0.5), True),  # no better than what was reported
        (case("human"), voted(1.0), False),
    ],
)
def test_what_counts_as_failing_again(failed, answer, fails):
    assert still_fails(failed, answer, LIMITS) == fails


def test_what_a_new_response_is_compared_with():
    assert comparison_response(case("judge_loses")) == " was good."
    assert (
        comparison_response(case("human", better=" was late.")) == " was late."
        and comparison_response(case("human")) == " was bad."
    )
    assert comparison_response(case("no_eos")) is None  # the jury is not asked for nothing


def test_the_try_is_kept_and_the_state_follows():
    good, bad = again(" was ok."), again(" was and", ended=False)
    cases = [case("no_eos", id=str(number)) for number in range(3)]
    tried = retest(
        cases, [[good, good], [good, bad], [good, good]], [True, True, False], LIMITS, "r1"
    )
    assert [each.state for each in tried] == [State.repaired, State.open, State.open]
    assert [(t.round, t.fired, t.of, t.ranked) for each in tried for t in each.tries] == [
        ("r1", 0, 2, True),
        ("r1", 1, 2, True),
        ("r1", 0, 2, False),  # the reward model still prefers the bad answer
    ]
    assert by_cause(tried, State.repaired) == {Cause.no_eos.value: 1}
