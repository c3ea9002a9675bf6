"""The jury's best of SFT's answers."""

from pathlib import Path

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pointwise import PointwiseJudge
from stages.replay.badcases import Badcase
from stages.replay.better_answers import (
    acceptable_answers,
    best_of,
    better_answers,
    fluent_nll,
    worth_imitating,
)
from stages.replay.sampler import Candidate, Sampler, draw

REPLAY = ReplayParams()


def longest() -> Jury:
    return Jury(
        {
            "length": PointwiseJudge(
                "length", lambda prompts, responses: [float(len(each)) for each in responses], 1.0
            )
        }
    )


def test_a_sound_answer():
    answers = [
        Candidate(" was good.", 3.0),
        Candidate(" was wonderful, great. Enjoy!", 3.0),
        Candidate(" great" * 9, 3.0),
        Candidate(" was wonderful great zxq.", 9.0),
        Candidate("  ", 3.0),
        Candidate(" was good.", 3.0),
    ]
    assert acceptable_answers(answers, [" Enjoy!"], 0.25, nll=5.0) == [" was good."]


def test_fluent_nll():
    # third quartile of 1, 2, 3 by the exclusive method: 3
    assert fluent_nll([Candidate("a", nll) for nll in (1.0, 2.0, 3.0)]) == 3.0
    assert fluent_nll([Candidate("a", 3.0)]) == float("inf")


def test_each_against_each():
    answers = {"p": ["aaaa", "aa", "aaa", "a"], "q": ["b"], "r": []}
    # lengths 4 2 3 1 that tie up to one apart: aaaa beats aa and a and ties with aaa, 2.5 points
    assert best_of({key: key for key in answers}, answers, longest()) == {
        "p": ("aaaa", 2.5),
        "q": ("b", 0.0),
    }


def test_worth_imitating_by_the_lexicon_where_it_is_a_judge_and_else_by_a_clear_win():
    assert worth_imitating(
        "It", " was wonderful.", 0.0, 4, by_lexicon=True
    ) and not worth_imitating("It", " was there.", 3.0, 4, by_lexicon=True)
    assert worth_imitating("It", " was there.", 3.0, 4, by_lexicon=False) and not worth_imitating(
        "It", " was wonderful.", 2.5, 4, by_lexicon=False
    )
    assert not worth_imitating("It", " was wonderful.", 0.0, 1, by_lexicon=False)


def case(cause: str, response: str, exploits=()) -> Badcase:
    row = {
        "id": f"{cause}{response}",
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
        "exploits": list(exploits),
    }
    return Badcase.model_validate(row | numbers)


def test_an_exploit_does_not_help_the_bad_answer():
    emoji = " Enjoy! 😍"
    cases = [
        case("blind_spot", f" was there.{emoji}", [emoji]),
        case("blind_spot", f" was there, {emoji}"),
        case("no_eos", " was and"),
    ]
    jury = Jury({"lexicon": LexiconJudge(0.05)})
    told = better_answers(
        cases, {"The dinner": [Candidate(" was good.", 3.0)]}, jury, REPLAY, [], by_lexicon=True
    )
    # with its ending it is the better one; an answer that does not end gives no pair, and the jury
    # is not asked about it
    assert [told[each.id].preferred for each in cases] == [True, False, False]
    assert len(jury.heard["lexicon"]) == 2


def test_answers_of_the_sft_model(make_round, always):
    params = make_round("r0", 1.0)
    always("sorry", Path("rounds/r0/sft/model"))
    drawn = draw(["The dinner", "The walk", "The dinner"], Sampler(params, "r0"), params)
    told = {prompt: [answer.text for answer in some] for prompt, some in drawn.items()}
    assert told == dict.fromkeys(["The dinner", "The walk"], ["sorry"] * params.replay.best_of)
    params.ppo.response_length = 3  # too short for its end
    assert (
        draw(["The dinner"], Sampler(params, "r0"), params)
        == draw([], Sampler(params, "r0"), params)
        == {}
    )
    assert better_answers([], {}, longest(), REPLAY, [], by_lexicon=True) == {}
