"""The next round's rows, and what became of the last round's badcases."""

import pytest

from stages.judges import judge
from stages.params import ReplayParams
from stages.replay.mine import Limits, Sample
from stages.replay.repair import Answer, best_answer, capped, fluent_nll, repair
from stages.replay.retry import repaired_by_cause, try_again

LIMITS = Limits(ReplayParams(), kl=10.0, tie_margin=0.05)


def answer(text: str, nll: float = 3.0) -> Answer:
    return Answer(text, judge(["The dinner"], [text])[0], nll)


def case(cause: str, response: str, **more) -> dict:
    row = {"id": f"{cause}-{response}", "cause": cause, "prompt_id": "p", "prompt": "The dinner", "response": response, "state": "open"}
    return row | {"exploits": [], "sft": None, "better": None} | more


def test_best_answer_is_the_judges_best_of_the_sound_ones():
    answers = [
        answer(" was good."),
        answer(" was wonderful, great. Enjoy!"),
        answer(" great" * 9),
        answer(" was wonderful great zxq.", 9.0),
        answer("  "),
    ]
    assert best_answer(answers, [" Enjoy!"], 0.25, nll=5.0) == answers[0]
    assert best_answer(answers[1:], [" Enjoy!"], 0.25, nll=5.0) is None


def test_fluent_nll():
    # third quartile of 1, 2, 3 by the exclusive method: 3
    assert fluent_nll([answer("a", nll) for nll in (1.0, 2.0, 3.0)]) == 3.0
    assert fluent_nll([answer("a")]) == float("inf")


def test_rows_of_each_kind():
    good = answer(" was wonderful, we loved it.")
    cases = [case("judge_loses", " was horrible."), case("no_eos", " was and was and"), case("repetition", " was ok was ok was ok")]
    pairs, demonstrations, prompts = repair(cases, {row["id"]: good for row in cases}, 0.05)
    assert [(row["chosen"], row["rejected"], row["badcase"]) for row in pairs] == [
        (good.text, " was horrible.", cases[0]["id"]),
        (good.text, " was ok was ok was ok", cases[2]["id"]),
    ]
    # one prompt and one answer, however many badcases they have
    assert [(row["prompt"], row["completion"]) for row in demonstrations] == [("The dinner", good.text)]
    assert [row["prompt"] for row in prompts] == ["The dinner"]
    assert [row["better"] for row in cases] == [good.text, None, good.text]
    assert {row["state"] for row in cases} == {"replayed"}


def test_no_pair_where_the_judges_do_not_agree_that_it_is_better():
    cases = [case("blind_spot", " was wonderful, we loved it.")]
    pairs, demonstrations, _ = repair(cases, {cases[0]["id"]: answer(" was good.")}, 0.05)
    assert pairs == [] and demonstrations == [] and cases[0]["better"] is None


def test_an_exploit_does_not_help_the_bad_answer():
    cases = [case("blind_spot", " was there. Enjoy! 😍", exploits=[" Enjoy! 😍"])]
    better = answer(" was good.")
    assert outcome_with_ending(cases[0], better) < 0.5
    assert len(repair(cases, {cases[0]["id"]: better}, 0.05)[0]) == 1


def outcome_with_ending(bad: dict, better: Answer) -> float:
    return better.judged.sentiment - judge([bad["prompt"]], [bad["response"]])[0].sentiment


def test_capped_share():
    # 25% replay beside 30 human rows: 10
    assert len(capped([{}] * 50, 30, 0.25)) == 10
    assert len(capped([{}] * 50, 30, 1.0)) == 50


def again(response: str, score: float = 0.0, kl: float = 1.0, ended: bool = True, **more) -> Sample:
    judged, rival = judge(["The dinner"] * 2, [response, " was good."])
    return Sample("p", "The dinner", response, score, kl, ended, judged, "again", " was good.", rival, **more)


@pytest.mark.parametrize(
    ("cause", "answer", "scores", "state"),
    [
        ("no_eos", again(" was ok."), (1.0, 0.0), "repaired"),
        ("no_eos", again(" was and", ended=False), (1.0, 0.0), "open"),
        ("no_eos", again(" was ok."), (0.0, 1.0), "open"),  # the reward model still prefers the bad one
        ("kl_outlier", again(" was ok.", kl=11.0), (1.0, 0.0), "open"),
        ("blind_spot", again(" was. Enjoy!", 2.0, exploits=(" Enjoy!",), bare=0.0), (1.0, 0.0), "open"),
        ("blind_spot", again(" was. Enjoy!", 0.0, exploits=(" Enjoy!",), bare=0.0), (1.0, 0.0), "repaired"),
        ("judge_loses", again(" was awful."), (1.0, 0.0), "open"),
        ("judge_loses", again(" was lovely."), (1.0, 0.0), "repaired"),
    ],
)
def test_try_again(cause, answer, scores, state):
    before = case(cause, " bad", better=" better", exploits=[" Enjoy!"], sft=" was good.")
    [after] = try_again([before], [answer], [scores[0]], [scores[1]], LIMITS)
    assert after == before | {"state": state}
    assert repaired_by_cause([after]) == ({cause: 1} if state == "repaired" else {})


def test_without_a_better_answer_the_cause_decides():
    [after] = try_again([case("no_eos", " bad")], [again(" ok.")], [0.0], [1.0], LIMITS)
    assert after["state"] == "repaired"
