"""Several judges and their common verdict."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.lib.core.errors import BadInput
from stages.lib.core.files import metric_name
from stages.lib.core.params import Params, check_params
from stages.lib.judging.jury import Jury
from stages.lib.judging.loading import base_model, load_jury
from stages.lib.judging.pairwise import JURY, Comparison
from stages.lib.judging.pointwise import PointwiseJudge, garbledness
from stages.lib.lm.scoring import RewardScorer

QUESTIONS = [
    Comparison("p", a, b) for a, b in (("aaa", "a"), ("a", "aaa"), ("b", "a"), ("aa", "bb"))
]


def count(letter):
    return lambda prompts, responses: [float(response.count(letter)) for response in responses]


def test_the_majority_decides():
    jury = Jury({letter: PointwiseJudge(letter, count(letter), 0.0) for letter in "ab"})
    assert jury.compare(QUESTIONS) == {
        "a": [1.0, 0.0, 0.0, 1.0],
        "b": [0.5, 0.5, 1.0, 0.0],
        JURY: [1.0, 0.0, 0.5, 0.5],
    }


def test_agreement_of_judges():
    jury = Jury({letter: PointwiseJudge(letter, count(letter), 0.0) for letter in "ab"})
    jury.compare(QUESTIONS)
    # a prefers A B B A, b prefers tie tie A B: never the same; by chance 2/4 1/4 + 2/4 1/4 = 1/4,
    # so kappa is (0 - 1/4) / (1 - 1/4)
    assert jury.report() == {
        "alone": {
            letter: {
                "tie_share": ties,
                "position_consistency": 1.0,
                "kappa": 1.0,
                "comparisons": 4,
                "unparsable": 0,
            }
            for letter, ties in {"a": 0.0, "b": 0.5}.items()
        },
        "pairs": {"a-b": {"agreement": 0.0, "kappa": pytest.approx(-1 / 3)}},
    }


def test_a_text_is_garbled_if_it_is_less_fluent_than_human_texts():
    # NLLs 1 to 21, of which 20 is the 95% quantile
    people = [{"prompt": "p", "completion": "x" * n} for n in range(1, 22)]
    scores = garbledness(
        lambda prompts, responses: [float(len(response)) for response in responses], people
    )
    assert scores(["p"] * 3, ["x", "x" * 20, "x" * 23]) == [0.0, 0.0, -3.0]


def test_judges_by_name(make_round):
    make_round("r0", 1.0)
    Path("mine.py").write_text(
        "def vowels(prompts, responses):\n"
        "    return [float(response.count('o')) for response in responses]\n"
    )
    shutil.copytree("rounds/r0/reward/model", "judge")
    named = ["lexicon", "fluency", "mine:vowels", "judge"]
    params = check_params(
        {"evaluate": {"judges": named}, "model": {"dtype": "float32", "threads": 1}}, "test"
    )
    votes = load_jury(params, "r0", base_model(params)).compare(
        [Comparison("The dinner", " took too long.", " was great.")]
    )
    assert list(votes) == ["lexicon", "fluency", "mine_vowels", "judge", JURY]
    assert (votes["lexicon"], votes["mine_vowels"]) == ([0.0], [1.0])
    missing = params.model_copy(
        update={"evaluate": params.evaluate.model_copy(update={"judges": ["mine:nothing"]})}
    )
    with pytest.raises(BadInput, match=r"evaluate\.judges: mine:nothing cannot be imported"):
        load_jury(missing, "r0", base_model(params))


def test_apart_is_the_second_reward_model(make_round):
    """Its head is the first one's, turned round."""
    params = make_round("r0", 1.0)
    shutil.copytree("rounds/r0/reward/model", "rounds/r0/reward/judge")
    weights = load_file("rounds/r0/reward/judge/model.safetensors")
    weights["score.weight"] *= -1
    save_file(weights, "rounds/r0/reward/judge/model.safetensors", metadata={"format": "pt"})
    shutil.copytree("rounds/r0/reward/model", "first")
    judges = {"evaluate": {"judges": ["apart", "first"]}, "reward": {"judge_share": 0.5}}
    changed = check_params(params.model_dump() | judges, "test")
    votes = load_jury(changed, "r0", base_model(changed)).compare(
        [Comparison("The dinner", " took too long.", " was great.")]
    )
    assert sorted([votes["apart"], votes["first"]]) == [[0.0], [1.0]]
    scorer = RewardScorer(Path("first"), AutoTokenizer.from_pretrained("first"), params)
    long, great = scorer(["The dinner"] * 2, [" took too long.", " was great."])
    assert votes["first"] == [float(long > great)]


def test_two_language_models_and_their_dimensions(make_round, chat_server):
    """`one` prefers the longer response, `two` always the first one, so it ties."""

    def answer(request):
        before_b = request["messages"][1]["content"].split("<response_B>")[0]
        longer = "A" if len(before_b) > 60 else "B"
        kind, true = (longer, longer) if request["model"] == "one" else ("A", "A")
        return f'{{"kind": "{kind}", "true": "{true}", "preference": "{kind}"}}'

    chat_server.answer = answer
    make_round("r0", 1.0)
    endpoint = {"base_url": chat_server.url, "rubric": {"kind": "Kinder.", "true": "Truer."}}
    judges = {
        "judges": ["endpoint", "endpoint:second"],
        "endpoints": {"second": endpoint | {"model": "two"}},
    }
    params = check_params(
        {"evaluate": judges, "annotate": {"endpoint": endpoint | {"model": "one"}}}, "test"
    )
    jury = load_jury(params, "r0", base_model(params))
    votes = jury.compare([Comparison("p", " a much longer text than the other", " b")])
    assert votes == {
        "endpoint": [1.0],
        "endpoint_second": [0.5],
        "endpoint/kind": [1.0],
        "endpoint/true": [1.0],
        "endpoint_second/kind": [0.5],
        "endpoint_second/true": [0.5],
        JURY: [1.0],
    }
    assert jury.report()["pairs"] == {"endpoint-endpoint_second": {"agreement": 0.0, "kappa": 0.0}}


def test_an_endpoint_must_be_described():
    with pytest.raises(
        BadInput, match=r"evaluate\.judges has endpoint:big: describe it in evaluate\.endpoints"
    ):
        check_params({"evaluate": {"judges": ["endpoint:big"]}}, "test")
    with pytest.raises(BadInput, match=r"has endpoint:big: set evaluate\.endpoints\.big\.base_url"):
        check_params(
            {"evaluate": {"judges": ["endpoint:big"], "endpoints": {"big": {"model": "x"}}}}, "test"
        )
    with pytest.raises(
        BadInput,
        match=r"evaluate\.judges has endpoint: "
        r"set annotate\.endpoint\.base_url and annotate\.endpoint\.model",
    ):
        check_params({"evaluate": {"judges": ["lexicon", "endpoint"]}}, "test")
    with pytest.raises(BadInput, match=r"evaluate\.judges has `apart`: set reward\.judge_share"):
        check_params({"evaluate": {"judges": ["apart"]}}, "test")
    assert Params().evaluate.judges == ["lexicon", "fluency"]
    with pytest.raises(BadInput, match=r"evaluate\.judges: .*lexicon is listed more than once"):
        check_params({"evaluate": {"judges": ["lexicon", "fluency", "lexicon"]}}, "test")
    assert metric_name("models/other rm") == "models_other_rm"
