"""The primary judge: the first of evaluate.judges, which every stage follows."""

import csv
import sys
from pathlib import Path
from statistics import fmean

import pytest

from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.evaluate.__main__ import main as evaluate
from stages.evaluate.checkpoint import main as evaluate_checkpoint
from stages.lib.core.files import read_json, read_jsonl
from stages.lib.core.judge_answers import answers_are_gone, cache_id
from stages.lib.core.params import Params, check_params
from stages.lib.core.rows import SIDES
from stages.lib.core.types import Metrics
from stages.lib.core.user_inputs import INPUTS
from stages.lib.judging.lexicon import lexicon
from stages.lib.judging.loading import load_primary_judge
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.metrics.stats import partial_correlation
from stages.ppo.__main__ import main as ppo
from stages.replay.__main__ import main as replay
from stages.sft.__main__ import main as sft
from tests.stages.judges import compared_texts, prefers

VOWELS = """def count(prompts, responses):
    return [float(sum(letter in "aeiou" for letter in response)) for response in responses]
"""
SHORT_PPO = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "validation_prompts": 2,
    "max_steps": 2,
    "response_length": 6,
}
# backwards: all read the fixture's models, whose texts differ
STAGES = (evaluate, replay, ppo, battery, sft)


def with_judges(params: Params, judges: list[str], **sections: object) -> Params:
    values = params.model_dump(mode="json") | {"ppo": SHORT_PPO} | sections
    values["evaluate"] = values["evaluate"] | {"judges": judges}
    return check_params(values, "test")


def remove_lexicon(monkeypatch: pytest.MonkeyPatch) -> None:
    lexicon.cache_clear()  # an earlier test may have loaded it
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)


def run_stages(params: Params) -> dict[str, Metrics]:
    """The metrics of all stages that a judge takes part in."""
    inputs(params, "r0")
    for stage in STAGES:
        stage(params, "r0")
    return {
        name: read_json(Path(f"rounds/r0/{name}/metrics.json"), "")
        for name in ("sft", "battery", "ppo", "evaluate", "replay")
    }


def test_without_the_lexicon_as_a_judge_no_stage_needs_it(make_round, monkeypatch):
    remove_lexicon(monkeypatch)
    with pytest.raises(ImportError):
        load_primary_judge(Params(), "r0").scores(["It"], [" was fine."])
    Path("vowel_judge.py").write_text(VOWELS)
    small = make_round("r0", 1.0)
    steps = {"learning_rate": 0.05, "num_train_epochs": 8.0, "max_steps": None}
    params = with_judges(small, ["vowel_judge:count"], sft=small.sft.model_dump() | steps)
    metrics = run_stages(params)
    assert (metrics["ppo"]["judge"], metrics["evaluate"]["judge"]) == (
        "vowel_judge_count",
        "vowel_judge_count",
    )
    check_sft_and_battery(metrics)
    check_evaluation(metrics["evaluate"])
    assert metrics["ppo"]["judge_score_mean"] > 0


def vowels(text: str) -> float:
    return float(sum(letter in "aeiou" for letter in text))


def check_sft_and_battery(metrics: dict[str, Metrics]) -> None:
    """The numbers are those of the function, on the texts that the stages read and wrote."""
    rows = read_jsonl(Path("rounds/r0/sft/samples.jsonl"), "")
    gains = [vowels(row["sft"]) - vowels(row["base"]) for row in rows]
    wins, losses = (sum(gain * sign > 0 for gain in gains) for sign in (1, -1))
    assert metrics["sft"]["net_win_rate"] == pytest.approx((wins - losses) / len(rows)) != 0
    pairs = read_jsonl(Path("rounds/r0/prepare/data/pairs_eval.jsonl"), "")
    rewards = {row["id"]: row for row in read_jsonl(Path("rounds/r0/reward/scores.jsonl"), "")}
    texts = [(row["id"], side, row[side]) for row in pairs for side in SIDES]
    assert metrics["battery"]["length_correlation_partial"] == partial_correlation(
        [rewards[id_][side] for id_, side, _ in texts],
        [float(len(text)) for _, _, text in texts],
        [[float(side == "chosen") for _, side, _ in texts], [vowels(text) for *_, text in texts]],
    )


def check_evaluation(metrics: Metrics) -> None:
    rows = read_jsonl(Path("rounds/r0/evaluate/samples.jsonl"), "")
    policy, sft = ([vowels(row[model]) for row in rows] for model in ("ppo", "sft"))
    assert [row["ppo_judge_score"] for row in rows] == policy
    assert metrics["ppo"]["judge_score"] == fmean(policy) != fmean(sft)
    assert metrics["judge_gain"] == pytest.approx(fmean(policy) - fmean(sft))
    lines = Path("rounds/r0/evaluate/curves.csv").read_text().splitlines()
    curve = list(csv.DictReader(lines))
    best = max(curve, key=lambda row: float(row["judge_score"]))
    furthest = max(curve, key=lambda row: float(row["kl"]))
    assert metrics["overoptimisation"]["measured_peak_update"] == int(best["step"])
    assert metrics["overoptimisation"]["gold_after_peak"] == pytest.approx(
        float(furthest["judge_score"]) - float(best["judge_score"])
    )


def test_a_language_model_as_the_only_judge(make_round, chat_server, monkeypatch):
    """It prefers the longer response; it gives no scores, so responses are compared with SFT's."""
    remove_lexicon(monkeypatch)

    def answer(request):
        a, b = compared_texts(request)
        return prefers(len(a) > len(b), len(a) <= len(b))

    chat_server.answer = answer
    annotate = {"endpoint": {"base_url": chat_server.url, "model": "long", "rubric": "Long."}}
    params = with_judges(make_round("r0", 1.0), ["endpoint"], annotate=annotate)
    metrics = run_stages(params)
    policy = metrics["evaluate"]["ppo"]
    assert policy["judge_score"] == metrics["evaluate"]["win_rate_endpoint"]
    mark = read_json(Path(".rondo/work/r0/evaluate/answers.json"))
    assert mark == {"cache": cache_id()} and not answers_are_gone("evaluate@r0")
    assert metrics["evaluate"]["sft"]["judge_score"] == 0.5
    assert metrics["battery"]["judge_correlation"] is None
    assert metrics["ppo"]["validation_judge_score_before"] == 0.5
    assert "judge_score_mean" not in metrics["ppo"]
    rows = read_jsonl(Path("rounds/r0/evaluate/samples.jsonl"), "")
    assert {row["ppo_judge_score"] for row in rows} <= {0.0, 0.5, 1.0}
    report = read_json(evaluate_checkpoint(params, "r0", "rounds/r0/ppo/policy"), "")
    for model in ("sft", "ppo", "checkpoint"):
        assert 0.0 <= report[model]["judge_score"] <= 1.0


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_a_run_stops_at_the_validation_at_which_the_judge_prefers_sft(make_round, algorithm):
    """The reward rises over 12 updates, and the judge likes no text but those of SFT."""
    Path("loyal_judge.py").write_text(
        "KNOWN = set()\n\n\n"
        "def score(prompts, responses):\n"
        "    KNOWN.update(responses if not KNOWN else ())\n"
        "    return [float(response in KNOWN) for response in responses]\n"
    )
    changes = {"max_steps": 14, "validation_updates": 12, "learning_rate": 0.01, "kl_coef": 0.01}
    changes |= {"kl_control": "fixed", "max_kl_per_token": 1000.0, "target_kl_per_token": 500.0}
    params = with_judges(
        make_round("r0", 1.0),
        ["loyal_judge:score"],
        ppo=SHORT_PPO | changes,
        algorithm=algorithm,
        dpo={"per_device_train_batch_size": 2, "num_train_epochs": 20, "learning_rate": 0.05},
    )
    inputs(params, "r0")
    ppo(params, "r0")
    metrics = read_json(Path("rounds/r0/ppo/metrics.json"), "")
    assert (metrics["stopped"], metrics["updates"]) == ("judge prefers SFT", 12)
    assert metrics["policy_update"] == 0


def test_a_judge_that_is_trained_after_sft_is_not_asked_by_sft(make_round):
    params = with_judges(make_round("r0", 1.0), ["apart"], reward={"judge_share": 0.5})
    inputs(params, "r0")
    sft(params, "r0")
    metrics = read_json(Path("rounds/r0/sft/metrics.json"), "")
    assert metrics["net_win_rate"] is None is metrics["net_win_rate_low"]


def test_stages_run_again_for_another_primary_judge_and_not_for_another_second_one(tmp_path):
    def recorded(judges: list[str], **endpoint: object) -> bytes:
        section = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "Be fair."}
        settings = {"evaluate": {"judges": judges}, "annotate": {"endpoint": section | endpoint}}
        inputs(check_params(settings, "test"), "r0")
        return (INPUTS / "primary_judge.json").read_bytes()

    assert recorded(["lexicon"]) == recorded(["lexicon", "fluency"])
    assert recorded(["lexicon"]) != recorded(["fluency", "lexicon"])
    assert recorded(["endpoint"]) == recorded(["endpoint"], concurrency=8)
    assert recorded(["endpoint"]) != recorded(["endpoint"], rubric="Longer is better.")


def test_equal_responses_tie_without_being_judged():
    shown = []

    def length(prompts, responses):
        shown.extend(responses)
        return [float(len(response)) for response in responses]

    judge = PrimaryJudge("length", PointwiseJudge("length", length, 0.0))
    outcomes = judge.outcomes(["p", "p", "q"], ["aa", "a", "b"], ["a", "aa", "b"])
    assert outcomes == [1.0, 0.0, 0.5] and "b" not in shown
    assert judge.scores_against(["p"], ["aaa"], ["a"]) == [3.0]
