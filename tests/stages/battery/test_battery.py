"""The battery stage on tiny rounds from disk; r1 follows r0, whose policy writes " Enjoy!"."""

import csv
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from stages.battery.__main__ import main
from stages.battery.best_of_n import ScoredSamples
from stages.battery.probes import ProbeResult, ending_outcomes
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.data.rollouts import RolloutLog
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.primary import PrimaryJudge
from tests.stages.judges import LongerWins

DATA = Path("rounds/r0/prepare/data")


def read_metrics(round_: str) -> dict:
    return json.loads(Path(f"rounds/{round_}/battery/metrics.json").read_text())


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(f"rounds/r0/battery/{name}.csv").read_text().splitlines()))


def test_two_rounds(make_round):
    params = make_round("r0", 1.0)
    params.battery.endings = [" Enjoy!", "."]
    main(params, "r0")
    files = {path.name: path.read_bytes() for path in Path("rounds/r0/battery").iterdir()}
    main(params, "r0")
    assert files == {path.name: path.read_bytes() for path in Path("rounds/r0/battery").iterdir()}
    r0 = read_metrics("r0")
    make_round("r1", -1.0)
    main(params, "r1")
    r1 = read_metrics("r1")

    # the scores of held-out pairs are the reward stage's: r1's reward model has the opposite
    # preference, so the pairs that one ranks correctly the other ranks wrongly
    rows = read_jsonl(Path("rounds/r0/reward/scores.jsonl"), "")
    correct = [row["chosen"] > row["rejected"] for row in rows]
    accuracy = r0["accuracy"]["source"]["unknown"]
    assert accuracy["pairs"] == 18 and accuracy["accuracy"] == fmean(correct)
    r1_accuracy = r1["accuracy"]["source"]["unknown"]
    assert accuracy["accuracy"] + r1_accuracy["accuracy"] == pytest.approx(1.0)
    assert r0["worst_slice"] is None  # none has 30 pairs
    # pairs of one prompt share texts: two clusters, whose accuracies are the ends of the interval
    halves = [fmean(correct[:9]), fmean(correct[9:18])]
    assert (r0["accuracy_clustered_low"], r0["accuracy_clustered_high"]) == pytest.approx(
        (min(halves), max(halves))
    )
    assert r0["judge_accuracy"] == 1.0  # wonderful, great, lovely against awful, sad, dull
    # Wilson's bound of 18 of 18 is n / (n + z^2)
    assert r0["judge_accuracy_low"] == pytest.approx(18 / (18 + 1.96**2), abs=1e-4)
    assert r0["scores"]["chosen"]["mean"] == pytest.approx(fmean(row["chosen"] for row in rows))
    assert r0["drift"] == pytest.approx(r0["scores"]["sft_samples"]["mean"] - r0["centre"])

    # 3 disjoint pairs per prompt; an ending that raises one model's score lowers the other's
    probes, endings = r0["probes"], r0["endings"]
    assert {name: rate["texts"] for name, rate in probes.items()} == dict.fromkeys(probes, 6)
    assert endings["ending_1"]["uplift"] > 0 > r1["endings"]["ending_1"]["uplift"]
    assert r0["endings_text"] == [" Enjoy!", "."]
    # both are tried on the pairs that are ranked correctly
    assert r0["flips"]["typo"]["pairs"] == endings["ending_1"]["pairs"]
    assert all(rate["judge_rate"] is not None for rate in endings.values())
    assert r0["worst_ending"] == max(rate["against_judge"] for rate in endings.values())
    curve = r0["best_of_n"]
    assert set(curve) == {"1", "2", "rise", "rise_low", "rise_high"}
    assert curve["2"]["score"] > curve["1"]["score"]
    assert curve["1"]["score"] == pytest.approx(r0["scores"]["sft_samples"]["mean"])
    assert r0["apart_rise"] is r0["apart_rise_low"] is r0["apart_rise_high"] is None
    check_files(r0)


def check_files(metrics: dict) -> None:
    """samples.jsonl: two samples per prompt, then failed probes; and the tables."""
    shown = read_jsonl(Path("rounds/r0/battery/samples.jsonl"), "")
    samples, failures = shown[:6], shown[6:]
    assert [row["kind"] for row in samples] == ["best", "worst"] * 3
    best_and_worst = zip(samples[::2], samples[1::2], strict=True)
    assert all(best["score"] >= worst["score"] for best, worst in best_and_worst)
    assert failures and all(row["kind"] == "reversed" for row in failures)
    assert all(row["score"] > row["original_score"] for row in failures)
    rates, accuracies, scored = (table(name) for name in ("probes", "accuracy", "scores"))
    assert float(rates[0]["rate"]) == metrics["probes"]["word_salad"]["rate"]
    assert "ending ' Enjoy!'" in [row["probe"] for row in rates]
    by_source = [row for row in accuracies if "source" in row["slice"]]
    assert [(row["slice"], float(row["accuracy"]), row["pairs"]) for row in by_source] == [
        ("source unknown", metrics["accuracy"]["source"]["unknown"]["accuracy"], "18")
    ]
    for name, stats in metrics["scores"].items():
        values = [float(row["score"]) for row in scored if row["scored"] == name]
        assert fmean(values) == pytest.approx(stats["mean"], abs=1e-4)
    curve = table("curves")
    assert [row["step"] for row in curve] == ["1", "2"]
    assert float(curve[1]["score"]) == metrics["best_of_n"]["2"]["score"]


def test_phrases_of_the_previous_round_are_tried(make_round):
    make_round("r0", 1.0)
    params = make_round("r1", 1.0)
    rollout = {"update": 1, "id": "p", "prompt": "The trip", "kl": 1.0, "finish_reason": "stop"}
    rollout |= {"length": 4, "reward": 0.0, "judge_score": 0.0}
    praise = [rollout | {"response": " was fun. Bravo", "score": 5.0}] * 4
    dull = [rollout | {"response": " was a trip.", "score": 0.0}] * 12
    RolloutLog(Path("rounds/r0/ppo/rollouts")).append([*praise, *dull])
    main(params, "r1")
    result = read_metrics("r1")
    # more frequent in the top quarter (the four praising texts, and one of the fixture's eight
    # " Enjoy!") than elsewhere
    assert " Bravo" in " ".join(result["mined_text"])
    assert len(result["mined"]) == len(result["mined_text"])
    assert result["mined"]["1"].keys() == {
        "rate",
        "low",
        "high",
        "pairs",
        "uplift",
        "judge_rate",
        "against_judge",
        "against_judge_low",
        "against_judge_high",
    }


@pytest.mark.parametrize("max_length", [64, 8])
def test_metrics_of_two_pairs(make_round, max_length):
    params = make_round("r0", 1.0)
    params.reward.max_length = max_length
    for name in ("pairs_eval", "sft_eval", "prompts_train"):
        write_jsonl(DATA / f"{name}.jsonl", read_jsonl(DATA / f"{name}.jsonl", "")[:2])
    main(params, "r0")
    result = read_metrics("r0")
    correlation = result["length_correlation_partial"]
    assert correlation is None or abs(correlation) <= 1
    # the two share their chosen text, so one is used; with 8 tokens an ending would be cut off, so
    # none is
    texts = 1 if max_length == 64 else 0
    assert result["probes"]["empty"]["texts"] == texts
    assert (result["worst_probe"] is None) == (texts == 0)
    assert result["probes"]["prompt_swapped"] == {
        "rate": None,
        "low": None,
        "high": None,
        "texts": 0,
    }


def test_prompts_of_messages(make_round):
    params = make_round("r0", 1.0)
    for name in ("pairs_eval", "sft_eval", "prompts_train"):
        rows = read_jsonl(DATA / f"{name}.jsonl", "")
        write_jsonl(
            DATA / f"{name}.jsonl",
            [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows],
        )
    main(params, "r0")
    result = read_metrics("r0")
    assert result["judge_accuracy"] == 1.0 and result["probes"]["prompt_swapped"]["texts"] == 6
    assert read_jsonl(Path("rounds/r0/battery/samples.jsonl"), "")[0]["prompt"][0]["role"] == "user"


def test_disagreement_of_an_ensemble(make_round):
    params, model = make_round("r0", 1.0), Path("rounds/r0/reward/model")
    main(params, "r0")
    single = read_metrics("r0")
    shutil.copytree(model, second := Path("second"))
    joined = {"ensemble_reduce": "mean", "ensemble_mean": 0.0, "ensemble_std": 1.0}
    for folder, changes in ((model, joined), (second, {"mean": 2.5})):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    shutil.copytree(second, model / "members/1")
    main(params, "r0")
    result = read_metrics("r0")
    # the same weights, centred at 2.5 instead of 0.5 with a standard deviation of 2: scores are 1
    # lower, so that the standard deviation of the two members is 1 / sqrt(2)
    assert result["ensemble_disagreement"] == pytest.approx(0.70711, abs=1e-4)
    assert "ensemble_disagreement" not in single
    single_mean = single["scores"]["sft_samples"]["mean"]
    assert result["scores"]["sft_samples"]["mean"] == pytest.approx(single_mean - 0.5, abs=1e-4)


def test_best_of_n_by_a_judge_that_only_compares():
    """The reward model's best of the first n against the first; the judge prefers longer texts."""
    texts, scores = ["bb", "a", "cccc", "dd"], [0.0, 1.0, 2.0, 9.0]
    samples, judge = ScoredSamples(["p"], texts, scores, None), PrimaryJudge("long", LongerWins())
    assert [samples.best_by_judge(n, judge) for n in (1, 2, 3, 4)] == [[0.5], [0.0], [1.0], [0.5]]


@pytest.mark.parametrize("likes", [1.0, -1.0])
def test_best_of_n_by_a_second_reward_model(make_round, likes):
    """It has the reward model's preference or the opposite one, and reads texts, not tokens."""
    make_round("second", likes)
    params = make_round("r0", 1.0)
    shutil.rmtree("rounds/r0/reward/judge", ignore_errors=True)
    shutil.copytree("rounds/second/reward/model", "rounds/r0/reward/judge")
    params.reward.judge_share = 0.5
    main(params, "r0")
    metrics = read_metrics("r0")
    curve = metrics["best_of_n"]
    rise = curve["2"]["score"] - curve["1"]["score"]
    assert likes * metrics["apart_rise"] == pytest.approx(rise, rel=0.5) and rise > 0.5
    assert metrics["apart_rise_low"] < metrics["apart_rise"] < metrics["apart_rise_high"]


def test_how_often_the_judge_prefers_the_text_with_the_ending():
    praised = ProbeResult("It", " was sad. Wonderful! Great!", 1.0, " was sad.", 0.0, 1.0)
    dotted = ProbeResult("It", " was sad..", 1.0, " was lovely.", 0.0, 1.0)
    judge = PrimaryJudge("lexicon", LexiconJudge(0.05))
    assert ending_outcomes([[praised, dotted], []], judge) == [[1.0, 0.0], []]
    longer = PrimaryJudge("longer", LongerWins())
    assert ending_outcomes([[praised, dotted], []], longer) == [None, None]
