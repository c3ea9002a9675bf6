"""The jury's best of SFT's answers."""

from pathlib import Path

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pointwise import PointwiseJudge
from stages.replay.badcases import Badcase
from stages.replay.sampler import Candidate, Sampler, sample_candidates
from stages.replay.training_rows import (
    acceptable_answers,
    best_of,
    better_answers,
    fluent_nll,
    worth_imitating,
)

REPLAY = ReplayParams()


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def longest() -> Jury:
    return Jury({"length": PointwiseJudge("length", length, 1.0)})


def test_acceptable_answers():
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


def test_worth_imitating_by_the_lexicon_if_it_is_a_judge_and_else_by_a_clear_win():
    assert worth_imitating("It", " was wonderful.", 0.0, 4, by_lexicon=True)
    assert not worth_imitating("It", " was there.", 3.0, 4, by_lexicon=True)
    assert worth_imitating("It", " was there.", 3.0, 4, by_lexicon=False)
    assert not worth_imitating("It", " was wonderful.", 2.5, 4, by_lexicon=False)
    assert not worth_imitating("It", " was wonderful.", 0.0, 1, by_lexicon=False)


def case(cause: str, response: str, exploits=()) -> Badcase:
    row = {"id": f"{cause}{response}", "round": "r0", "cause": cause, "origin": "fresh"}
    row |= {"prompt_id": "p", "prompt": "The dinner", "response": response, "score": 0.0}
    row |= {"sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    return Badcase.model_validate(row | {"exploits": list(exploits)})


def test_an_exploit_does_not_help_the_bad_answer():
    emoji = " Enjoy! 😍"
    cases = [
        case("blind_spot", f" was there.{emoji}", [emoji]),
        case("blind_spot", f" was there, {emoji}"),
        case("no_eos", " was and"),
    ]
    jury = Jury({"lexicon": LexiconJudge(0.05)})
    candidates = {"The dinner": [Candidate(" was good.", 3.0)]}
    better = better_answers(cases, candidates, jury, REPLAY, [], by_lexicon=True)
    # with its ending the bad answer wins; a badcase that does not end gives no pair, and needs no
    # comparison by the jury
    assert [better[badcase.id].preferred for badcase in cases] == [True, False, False]
    assert len(jury.verdicts["lexicon"]) == 2


def test_answers_of_the_sft_model(make_round, always):
    params = make_round("r0", 1.0)
    always("sorry", Path("rounds/r0/sft/model"))
    sampler = Sampler(params, "r0")
    candidates = sample_candidates(["The dinner", "The walk", "The dinner"], sampler, params)
    texts = {prompt: [answer.text for answer in answers] for prompt, answers in candidates.items()}
    assert texts == dict.fromkeys(["The dinner", "The walk"], ["sorry"] * params.replay.best_of)
    params.ppo.response_length = 3  # too short for EOS
    sampler = Sampler(params, "r0")
    assert sample_candidates(["The dinner"], sampler, params) == {}
    assert sample_candidates([], sampler, params) == {}
    assert better_answers([], {}, longest(), REPLAY, [], by_lexicon=True) == {}
