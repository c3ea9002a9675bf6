"""The next round's rows."""

from stages.badcases import Badcase, State
from stages.judges import judge
from stages.replay.repair import Answer, best_answer, capped, fluent_nll, repair


def answer(text: str, nll: float = 3.0) -> Answer:
    return Answer(text, judge(["The dinner"], [text])[0], nll)


def case(cause: str, response: str, **more) -> Badcase:
    row = {"id": f"{cause}-{response}", "round": "r0", "cause": cause, "prompt_id": "p", "prompt": "The dinner", "response": response}
    numbers = {"origin": "fresh", "score": 0.0, "sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    return Badcase.model_validate(row | numbers | more)


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
    replayed, pairs, demonstrations, prompts = repair(cases, {each.id: good for each in cases}, 0.05)
    assert [(row["chosen"], row["rejected"], row["badcase"]) for row in pairs] == [
        (good.text, " was horrible.", cases[0].id),
        (good.text, " was ok was ok was ok", cases[2].id),
    ]
    # one prompt and one answer, however many badcases they have
    assert [(row["prompt"], row["completion"]) for row in demonstrations] == [("The dinner", good.text)]
    assert [row["prompt"] for row in prompts] == ["The dinner"]
    assert [each.better for each in replayed] == [good.text, None, good.text]
    assert {each.state for each in replayed} == {State.replayed} and {each.state for each in cases} == {State.open}


def test_no_pair_where_the_judges_do_not_agree_that_it_is_better():
    cases = [case("blind_spot", " was wonderful, we loved it.")]
    replayed, pairs, demonstrations, _ = repair(cases, {cases[0].id: answer(" was good.")}, 0.05)
    assert pairs == [] and demonstrations == [] and replayed[0].better is None


def test_an_exploit_does_not_help_the_bad_answer():
    cases = [case("blind_spot", " was there. Enjoy! 😍", exploits=[" Enjoy! 😍"])]
    better = answer(" was good.")
    assert outcome_with_ending(cases[0], better) < 0.5
    assert len(repair(cases, {cases[0].id: better}, 0.05)[1]) == 1


def outcome_with_ending(bad: Badcase, better: Answer) -> float:
    return better.judged.sentiment - judge([bad.prompt], [bad.response])[0].sentiment


def test_a_persons_better_answer_is_taken_as_it_is():
    cases = [case("human", " was wonderful.", better=" was served at noon.")]
    replayed, pairs, demonstrations, _ = repair(cases, {cases[0].id: answer(" was great, lovely, wonderful.")}, 0.05)
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [(" was served at noon.", " was wonderful.")]
    assert [row["completion"] for row in demonstrations] == [" was served at noon."]
    assert replayed[0].better == " was served at noon."


def test_capped_share():
    # 25% replay beside 30 human rows: 10
    assert len(capped([{}] * 50, 30, 0.25)) == 10
    assert len(capped([{}] * 50, 30, 1.0)) == 50
