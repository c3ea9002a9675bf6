"""The next round's rows."""

from stages.replay.badcases import Badcase, State
from stages.replay.training_rows import BetterAnswer, cap_share, make_training_rows


def case(cause: str, response: str, **more) -> Badcase:
    row = {
        "id": f"{cause}-{response}",
        "round": "r0",
        "cause": cause,
        "prompt_id": "p",
        "prompt": "The dinner",
        "response": response,
    }
    numbers = {
        "origin": "fresh",
        "score": 0.0,
        "sentiment": 0.0,
        "sentiment_plain": 0.0,
        "repetition": 0.0,
    }
    return Badcase.model_validate(row | numbers | more)


def test_rows_of_each_kind():
    cases = [
        case("judge_loses", " was horrible."),
        case("no_eos", " was and was and"),
        case("repetition", " was ok was ok was ok"),
    ]
    text = " was wonderful, we loved it."
    best = {
        each.id: BetterAnswer(text, preferred=each.cause.value != "no_eos", good=True)
        for each in cases
    }
    replayed, pairs, demonstrations, prompts = make_training_rows(cases, best)
    assert [(row["chosen"], row["rejected"], row["badcase"]) for row in pairs] == [
        (text, " was horrible.", cases[0].id),
        (text, " was ok was ok was ok", cases[2].id),
    ]
    # one prompt and one answer, however many badcases they have
    assert [(row["prompt"], row["completion"]) for row in demonstrations] == [("The dinner", text)]
    assert [row["prompt"] for row in prompts] == ["The dinner"]
    assert [each.better for each in replayed] == [text, None, text]
    assert {each.state for each in replayed} == {State.replayed} and {
        each.state for each in cases
    } == {State.open}


def test_no_pair_where_the_jury_does_not_find_it_better():
    cases = [case("blind_spot", " was wonderful."), case("blind_spot", " was there.")]
    replayed, pairs, demonstrations, prompts = make_training_rows(
        cases, {cases[0].id: BetterAnswer(" was good.", preferred=False, good=False)}
    )
    assert (
        pairs == []
        and demonstrations == []
        and [each.better for each in replayed] == [None, None]
        and len(prompts) == 1
    )


def test_a_persons_better_answer_is_taken_as_it_is():
    cases = [case("human", " was wonderful.", better=" was served at noon.")]
    replayed, pairs, demonstrations, _ = make_training_rows(
        cases,
        {cases[0].id: BetterAnswer(" was great, lovely, wonderful.", preferred=True, good=True)},
    )
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        (" was served at noon.", " was wonderful.")
    ]
    assert [row["completion"] for row in demonstrations] == [" was served at noon."]
    assert replayed[0].better == " was served at noon."


def test_capped_share():
    # 25% replay beside 30 human rows: 10
    assert len(cap_share([{}] * 50, 30, 0.25)) == 10
    assert len(cap_share([{}] * 50, 30, 1.0)) == 50
