"""Several judges; agreement (Cohen's kappa and Wilson's interval by hand) and ranking."""

import json
import shutil
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
from safetensors.torch import load_file, save_file

from stages.lib.core.errors import BadInput
from stages.lib.core.files import metric_name
from stages.lib.core.params import Params, check_params
from stages.lib.data.splits import calibration_demonstrations
from stages.lib.judging.jury import (
    Jury,
    all_pairs,
    best_and_worst,
    between_orders,
    copeland_scores,
    human_agreement,
)
from stages.lib.judging.loading import base_model, load_judge, load_jury
from stages.lib.judging.pairwise import JURY, Comparison, Preference, TwoOrderVerdict, Verdict
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


def test_a_reward_model_from_elsewhere_gets_the_unit_of_ours(make_round):
    """Models that differ in the unit and the zero of their scores judge alike."""
    params, demonstrations = make_round("r0", 1.0), calibration_demonstrations("r0", 0)
    texts = [row["prompt"] for row in demonstrations], [row["completion"] for row in demonstrations]
    judged = []
    for scale in (1.0, 1000.0):
        folder = Path(f"elsewhere/{scale}")
        shutil.copytree("rounds/r0/reward/model", folder)
        config = json.loads((folder / "config.json").read_text())
        del config["mean"], config["std"]
        (folder / "config.json").write_text(json.dumps(config))
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] = scale * weights["score.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        judge = load_judge(str(folder), params, "r0", base_model(params))
        scores = judge.scores(*texts)
        assert fmean(scores) == pytest.approx(0, abs=1e-4)
        assert stdev(scores) == pytest.approx(1, abs=1e-4)
        prompts = ["The dinner", "Our concert", "My cat"]
        judged.append(judge.scores(prompts, [" was great.", " took too long.", " sleeps"]))
    assert judged[0] == pytest.approx(judged[1], rel=1e-3) and len(set(judged[0])) == 3
    Path("rounds/r0/prepare/data/sft_eval.jsonl").write_text("")
    with pytest.raises(BadInput, match=r"evaluate\.judges: elsewhere/1\.0: .* no demonstrations"):
        load_judge("elsewhere/1.0", params, "r0", base_model(params))


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
    scorer = RewardScorer(Path("first"), params)
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
        r"set annotate\.endpoint\.base_url and annotate\.endpoint\.model and "
        r"annotate\.endpoint\.rubric",
    ):
        check_params({"evaluate": {"judges": ["lexicon", "endpoint"]}}, "test")
    # no rubric is made up: each language model that judges has its own, and says for which task
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "x"}
    with pytest.raises(BadInput, match=r"big: set evaluate\.endpoints\.big\.rubric \("):
        check_params(
            {"evaluate": {"judges": ["endpoint:big"], "endpoints": {"big": server}}}, "test"
        )
    labels = {"annotator": "judge", "judge": "endpoint", "endpoint": server}
    with pytest.raises(BadInput, match=r"judge is endpoint: set annotate\.endpoint\.rubric \("):
        check_params({"annotate": labels}, "test")
    check_params({"annotate": labels | {"constitution": "principles.txt"}}, "test")
    with pytest.raises(BadInput, match=r"expected a text that says what makes a response better"):
        check_params({"annotate": {"endpoint": server | {"rubric": " "}}}, "test")
    with pytest.raises(BadInput, match=r"evaluate\.judges has `apart`: set reward\.judge_share"):
        check_params({"evaluate": {"judges": ["apart"]}}, "test")
    assert Params().evaluate.judges == ["lexicon", "zero_shot", "fluency"]
    with pytest.raises(BadInput, match=r"evaluate\.judges: .*lexicon is listed more than once"):
        check_params({"evaluate": {"judges": ["lexicon", "fluency", "lexicon"]}}, "test")
    with pytest.raises(BadInput, match=r"evaluate\.zero_shot: .*are the same answer"):
        check_params({"evaluate": {"zero_shot": {"better": " good", "worse": " good"}}}, "test")
    assert metric_name("models/other rm") == "models_other_rm"


A, B, TIE = (Verdict(preference) for preference in (Preference.a, Preference.b, Preference.tie))


def test_between_orders():
    """First order A A A B B tie, second A A B B A tie: 4 of 6 equal; by chance 3/6 3/6 + 2/6 2/6 +
    1/6 1/6 = 14/36.
    """
    orders = [(A, A), (A, A), (A, B), (B, B), (B, A), (TIE, TIE)]
    result = between_orders(
        [
            *(TwoOrderVerdict(*order) for order in orders),
            TwoOrderVerdict(A, None),
            TwoOrderVerdict(None, None),
        ]
    )
    assert result["position_consistency"] == pytest.approx(4 / 6)
    assert result["kappa"] == pytest.approx((4 / 6 - 14 / 36) / (1 - 14 / 36))


def test_a_judge_that_always_answers_a_never_agrees_with_itself():
    # the second verdict is converted back to the first order
    result = between_orders([TwoOrderVerdict(A, B)] * 5)
    assert result == {"position_consistency": 0.0, "kappa": 0.0}


def test_kappa_is_undefined_if_all_answers_are_the_same():
    assert between_orders([TwoOrderVerdict(TIE, TIE)] * 3) == {
        "position_consistency": 1.0,
        "kappa": None,
    }
    assert between_orders([TwoOrderVerdict(A, None)]) == {
        "position_consistency": None,
        "kappa": None,
    }


def test_agreement_with_people():
    """People chose A: correct in 3 of 4 decided comparisons; the others are a tie, a preference
    that changes with the order, and an unreadable answer.
    """
    result = human_agreement(
        [
            *[TwoOrderVerdict(A, A)] * 3,
            TwoOrderVerdict(B, B),
            TwoOrderVerdict(TIE, TIE),
            TwoOrderVerdict(A, B),
            TwoOrderVerdict(None, A),
        ]
    )
    z, n, p = 1.96, 4, 0.75
    centre, half = (
        (p + z**2 / 8) / (1 + z**2 / n),
        z * sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n),
    )
    assert result == {
        "rate": 0.75,
        "low": pytest.approx(centre - half, abs=1e-4),
        "high": pytest.approx(centre + half, abs=1e-4),
        "pairs": 4,
        "ties": 2,
        "unparsable": 1,
    }
    assert human_agreement([TwoOrderVerdict(TIE, TIE)]) == {
        "rate": None,
        "low": None,
        "high": None,
        "pairs": 0,
        "ties": 1,
        "unparsable": 0,
    }


def test_every_response_is_paired_with_every_other():
    assert all_pairs(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all_pairs(1) == []


@pytest.mark.parametrize(
    ("votes", "scores"),
    [
        # 2 beats all others, 0 beats 1 and 3, 3 beats 1
        ([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 3.0, 1.0]),
        # all tie: half a point for each of three
        ([0.5] * 6, [1.5, 1.5, 1.5, 1.5]),
        # 0 beats 1 and 2 and ties with 3, 1 beats 2 and 3, 2 beats 3
        ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], [2.5, 2.0, 1.0, 0.5]),
    ],
)
def test_scores_of_four_responses(votes, scores):
    assert copeland_scores(4, dict(zip(all_pairs(4), votes, strict=True))) == scores


def test_a_cycle_scores_all_equal():
    # 0 beats 1, 1 beats 2, 2 beats 0
    assert copeland_scores(3, {(0, 1): 1.0, (0, 2): 0.0, (1, 2): 1.0}) == [1.0, 1.0, 1.0]


def test_one_response_has_no_points():
    assert copeland_scores(1, {}) == [0.0]


@pytest.mark.parametrize(
    ("votes", "scores", "pair"),
    [
        # 2 beats all, 0 beats 1 and 3, 3 beats 1
        ([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 3.0, 1.0], (2, 1)),
        # all tie
        ([0.5] * 6, [1.5, 1.5, 1.5, 1.5], None),
        # only 0 beats 1: it leads by one point; the others tie
        ([1.0, 0.5, 0.5, 0.5, 0.5, 0.5], [2.0, 1.0, 1.5, 1.5], (0, 1)),
        # the best (0) and the worst (3) tied with each other; of the comparisons with a winner,
        # 0 over 2 is the first with a lead of 1.5
        ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], [2.5, 2.0, 1.0, 0.5], (0, 2)),
        # 3 beats 0, which has as many points
        ([1.0, 1.0, 0.0, 1.0, 0.5, 0.5], [2.0, 1.5, 0.5, 2.0], (0, 2)),
    ],
)
def test_best_and_worst_of_four(votes, scores, pair):
    votes_by_pair = dict(zip(all_pairs(4), votes, strict=True))
    assert copeland_scores(4, votes_by_pair) == scores
    assert best_and_worst(scores, votes_by_pair) == pair


def test_a_cycle_has_no_best():
    # 0 beats 1, 2 beats 0, 1 beats 2
    assert best_and_worst([1.0, 1.0, 1.0], {(0, 1): 1.0, (0, 2): 0.0, (1, 2): 1.0}) is None
    assert best_and_worst([0.0], {}) is None
