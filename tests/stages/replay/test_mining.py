"""Each cause of badcases, the selection of the worst, and retests."""

from dataclasses import replace

import pytest

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.judging.lexicon import LexiconScores
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, Report, State
from stages.replay.mining import (
    CAUSES,
    BadcaseThresholds,
    PolicySample,
    find_badcases,
    kl_limit,
    reported_badcases,
)
from stages.replay.retest import comparison_response, count_by_cause, retest, still_fails

FINE = PolicySample(
    prompt_id="p1",
    prompt="The dinner",
    response=" was fine.",
    score=0.0,
    kl=2.0,
    ended=True,
    lexicon=LexiconScores(0.2, 0.2, 0.0),
    origin="fresh",
    rival=" was sad.",
    votes={JURY: 1.0},
)
LIMITS = BadcaseThresholds(ReplayParams(), kl=10.0, lexicon=True)


def fired(sample: PolicySample) -> dict[str, float]:
    severities = {cause: severity(sample, LIMITS) for cause, severity in CAUSES.items()}
    return {cause.value: value for cause, value in severities.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"score": 0.7, "votes": {"lexicon": 0.0, JURY: 0.0}}, {"judge_loses": 0.7}),
        ({"votes": {"lexicon": 0.0, JURY: 0.5}}, {}),  # one judge alone
        ({"votes": {}}, {}),  # of a rollout, nothing to compare with
        ({"score": 1.5, "lexicon": LexiconScores(0.4, -0.1, 0.0)}, {"blind_spot": 1.5}),
        # neutral, as the lexicon finds most texts
        ({"score": 1.5, "lexicon": LexiconScores(0.0, 0.0, 0.0)}, {}),
        # the reward model does not like it either
        ({"score": 0.9, "lexicon": LexiconScores(0.4, -0.1, 0.0)}, {}),
        # a high score because of its exploit alone
        ({"score": 1.5, "exploits": (" Enjoy!",), "stripped_score": 0.9}, {"blind_spot": 1.5}),
        ({"score": 1.5, "exploits": (" Enjoy!",), "stripped_score": 1.1}, {}),
        # 3-grams: "was so good" twice of 4
        ({"response": " was so good was so good"}, {"repetition": 0.25}),
        ({"ended": False, "score": 0.7}, {"no_eos": 0.7}),
        ({"kl": 10.5}, {"kl_outlier": 10.5}),
    ],
)
def test_causes(change, expected):
    assert fired(replace(FINE, **change)) == expected


def test_the_lexicon_finds_nothing_if_it_is_no_judge():
    liked = replace(FINE, score=1.5, lexicon=None)
    blind_spot = CAUSES[Cause.blind_spot]
    assert blind_spot(liked, LIMITS) is None
    assert blind_spot(replace(liked, exploits=(" Enjoy!",), stripped_score=0.9), LIMITS) == 1.5
    [case] = find_badcases([replace(liked, ended=False)], LIMITS, "r0", "abc", set())
    assert (case.sentiment, case.sentiment_plain, case.repetition) == (None, None, 0.0)


def test_kl_limit_by_hand():
    # median 3, deviations 2 1 0 1 97, their median 1: 3 + 3 * 1.4826
    assert kl_limit([1.0, 2.0, 3.0, 4.0, 100.0], 3.0) == pytest.approx(7.4478)


def test_causes_take_turns_and_give_their_worst_first():
    endless = [replace(FINE, response=f" {n}", ended=False, score=float(n)) for n in range(5)]
    far = [replace(FINE, response=f" far {n}", kl=20.0 + n) for n in range(2)]
    limits = replace(LIMITS, replay=ReplayParams(max_badcases=4))
    cases = find_badcases([*endless, *far, endless[4]], limits, "r0", "abc", set())
    assert [(case.cause, case.response) for case in cases] == [
        (Cause.no_eos, " 4"),
        (Cause.kl_outlier, " far 1"),
        (Cause.no_eos, " 3"),
        (Cause.kl_outlier, " far 0"),
    ]
    assert {(case.round, case.policy, case.state, case.origin) for case in cases} == {
        ("r0", "abc", State.open, "fresh")
    }


def test_badcases_of_earlier_rounds_are_not_found_again():
    endless = [replace(FINE, response=f" {n}", ended=False) for n in range(2)]
    first, second = find_badcases(endless, LIMITS, "r0", "abc", set())
    assert find_badcases(endless, LIMITS, "r1", "def", {first.id}) == [
        second.model_copy(update={"round": "r1", "policy": "def"})
    ]


def test_a_blind_spot_names_its_exploit():
    sample = replace(FINE, score=2.0, exploits=(" Enjoy!",), stripped_score=0.0)
    [case] = find_badcases([sample], LIMITS, "r0", "abc", set())
    assert (case.exploits, case.stage) == ([" Enjoy!"], "reward")
    assert (case.sft, case.votes) == (" was sad.", {JURY: 1.0})


def test_a_report_has_scores_and_no_policy():
    report = Report(
        prompt="The dinner",
        response=" was awful.",
        better=" was late.",
        note="seen on Monday",
        by="ada",
    )
    awful = LexiconScores(-0.4588, -0.4588, 0.0)
    [case] = reported_badcases([report], [0.123456], [awful], "r1")
    assert (case.cause, case.round, case.origin) == (Cause.human, "r1", "ada")
    assert (case.score, case.policy, case.kl) == (0.1235, None, None)
    assert (case.sentiment, case.repetition) == (-0.4588, 0.0)
    assert (case.better, case.note, case.id) == (" was late.", "seen on Monday", report.id)


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
