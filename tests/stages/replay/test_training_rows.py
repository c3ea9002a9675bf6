"""The next round's training rows."""

from stages.lib.core.params import Params
from stages.replay.badcases import Badcase, State
from stages.replay.training_rows import (
    BetterAnswer,
    add_earlier,
    cap_share,
    drop_leaks,
    limit_rows,
    make_training_rows,
)


def case(cause: str, response: str, **changes) -> Badcase:
    row = {"id": f"{cause}-{response}", "round": "r0", "cause": cause, "origin": "fresh"}
    row |= {"prompt_id": "p", "prompt": "The dinner", "response": response, "score": 0.0}
    row |= {"sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    return Badcase.model_validate(row | changes)


def test_rows_of_each_kind():
    cases = [
        case("judge_loses", " was horrible."),
        case("no_eos", " was and was and"),
        case("repetition", " was ok was ok was ok"),
    ]
    text = " was wonderful, we loved it."
    best = {
        badcase.id: BetterAnswer(text, preferred=badcase.cause.value != "no_eos", good=True)
        for badcase in cases
    }
    replayed, pairs, demonstrations, prompts = make_training_rows(cases, best)
    assert [(row["chosen"], row["rejected"], row["badcase"]) for row in pairs] == [
        (text, " was horrible.", cases[0].id),
        (text, " was ok was ok was ok", cases[2].id),
    ]
    # a prompt with one answer gives one row, however many badcases it has
    assert [(row["prompt"], row["completion"]) for row in demonstrations] == [("The dinner", text)]
    assert [row["prompt"] for row in prompts] == ["The dinner"]
    assert [badcase.better for badcase in replayed] == [text, None, text]
    assert {badcase.state for badcase in replayed} == {State.replayed}
    assert {badcase.state for badcase in cases} == {State.open}


def test_no_pair_if_the_jury_does_not_prefer_the_answer():
    cases = [case("blind_spot", " was wonderful."), case("blind_spot", " was there.")]
    best = {cases[0].id: BetterAnswer(" was good.", preferred=False, good=False)}
    replayed, pairs, demonstrations, prompts = make_training_rows(cases, best)
    assert pairs == [] and demonstrations == []
    assert [badcase.better for badcase in replayed] == [None, None]
    assert len(prompts) == 1


def test_a_persons_better_answer_is_taken_as_it_is():
    cases = [case("human", " was wonderful.", better=" was served at noon.")]
    answer = BetterAnswer(" was great, lovely, wonderful.", preferred=True, good=True)
    replayed, pairs, demonstrations, _ = make_training_rows(cases, {cases[0].id: answer})
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        (" was served at noon.", " was wonderful.")
    ]
    assert [row["completion"] for row in demonstrations] == [" was served at noon."]
    assert replayed[0].better == " was served at noon."


def test_rows_that_would_leak_in_the_next_round_are_dropped_and_counted():
    tale = "once upon a time there were two moons above a sea of glass"  # 13 words
    evaluation = {
        "sft_eval": [{"id": "e", "prompt": "Our meeting", "completion": f" began: {tale}."}]
    }
    leaking = {"id": "a", "prompt": "The walk", "completion": f", {tale}!"}
    other = {"id": "b", "prompt": "The walk", "completion": " was great."}
    pair = {"id": "c", "prompt": "The trip", "chosen": " was fine.", "rejected": f" {tale}"}
    prompts = [{"id": "d", "prompt": "The trip"}]
    made = {"pairs": [pair], "sft": [leaking, other], "prompts": prompts}
    kept = {"pairs": [], "sft": [other], "prompts": prompts}
    assert drop_leaks(made, evaluation, 0.9) == (kept, 2)


def test_capped_share():
    # 25% replay rows, with 30 human rows: 10
    assert len(cap_share([{}] * 50, 30, 0.25)) == 10
    assert len(cap_share([{}] * 50, 30, 1.0)) == 50


def test_earlier_rows_follow_the_new_ones_each_text_once():
    def row(id_, prompt="The trip", **texts):
        return {"id": id_, "prompt": prompt, **texts}

    made = {
        "pairs": [row("a", chosen=" x", rejected=" y")],
        "sft": [row("d", completion=" x")],
        "prompts": [row("p"), row("q", "The walk")],
    }
    other_pair = row("b", chosen=" x", rejected=" z")
    earlier = {
        "pairs": [row("c", "the  TRIP", chosen=" x", rejected=" y"), other_pair, other_pair],
        "sft": [row("e", completion=" z"), row("f", "The walk", completion=" x")],
        "prompts": [row("r"), row("s", "The party")],
    }
    assert add_earlier(made, earlier) == {
        "pairs": [*made["pairs"], other_pair],
        "sft": [*made["sft"], *earlier["sft"]],
        "prompts": [*made["prompts"], row("s", "The party")],
    }


def test_all_copies_of_the_newest_rows_stay():
    params = Params.model_validate({"replay": {"weight": 2, "max_share": 0.5}})
    rows = [{"id": id_, "prompt": id_} for id_ in "abc"]
    made = {"pairs": [], "sft": [], "prompts": rows}
    kept, leaked = limit_rows(made, {}, {"pairs": 9, "sft": 9, "prompts": 4}, params)
    assert [row["id"] for row in kept["prompts"]] == ["a", "a", "b", "b"] and leaked == 0
