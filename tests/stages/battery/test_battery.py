"""The battery on tiny rounds from disk; r1 comes after r0, whose policy writes " Enjoy!"."""

import csv
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from stages.battery.__main__ import judged, main
from stages.battery.probes import ProbeResult
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, write_jsonl

DATA = Path("rounds/r0/prepare/data")


def metrics(round_: str) -> dict:
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
    zero = metrics("r0")
    make_round("r1", -1.0)
    main(params, "r1")
    one = metrics("r1")

    # the held-out pairs' scores are the reward stage's: r1's has the opposite taste, so what one
    # ranks rightly the other does not
    rows = read_jsonl(Path("rounds/r0/reward/scores.jsonl"), "")
    accuracy = zero["accuracy"]["source"]["unknown"]
    assert accuracy["pairs"] == 18 and accuracy["accuracy"] == fmean(
        row["chosen"] > row["rejected"] for row in rows
    )
    assert accuracy["accuracy"] + one["accuracy"]["source"]["unknown"]["accuracy"] == pytest.approx(
        1.0
    )
    assert zero["worst_slice"] is None  # none has 30 pairs
    # the pairs of a prompt hang together by their texts: two clusters, whose accuracies are the
    # ends
    halves = [
        fmean(row["chosen"] > row["rejected"] for row in rows[part])
        for part in (slice(9), slice(9, 18))
    ]
    assert (zero["accuracy_clustered_low"], zero["accuracy_clustered_high"]) == pytest.approx(
        (min(halves), max(halves))
    )
    assert zero["judge_accuracy"] == 1.0  # wonderful, great, lovely against awful, sad, dull
    assert zero["scores"]["chosen"]["mean"] == pytest.approx(fmean(row["chosen"] for row in rows))
    assert zero["drift"] == pytest.approx(zero["scores"]["sft_samples"]["mean"] - zero["centre"])

    # 3 disjoint pairs a prompt; an ending that raises one taste lowers the other
    assert {name: told["texts"] for name, told in zero["probes"].items()} == dict.fromkeys(
        zero["probes"], 6
    )
    assert zero["endings"]["ending_1"]["uplift"] > 0 > one["endings"]["ending_1"]["uplift"]
    assert zero["endings_text"] == [" Enjoy!", "."] and zero["worst_ending"] == max(
        told["rate"] for told in zero["endings"].values()
    )
    assert set(zero["best_of_n"]) == {"1", "2", "rise", "rise_low", "rise_high"}
    assert zero["best_of_n"]["2"]["score"] > zero["best_of_n"]["1"]["score"]
    assert zero["best_of_n"]["1"]["score"] == pytest.approx(zero["scores"]["sft_samples"]["mean"])

    # what can be looked at: two answers a prompt, and what fooled the reward model
    shown = read_jsonl(Path("rounds/r0/battery/samples.jsonl"), "")
    assert [row["kind"] for row in shown[:6]] == ["best", "worst"] * 3
    assert all(
        best["score"] >= worst["score"]
        for best, worst in zip(shown[:6:2], shown[1:6:2], strict=True)
    )
    assert shown[6:] and all(
        row["kind"] == "fooled" and row["score"] > row["original_score"] for row in shown[6:]
    )
    rates, accuracies, scored = (table(name) for name in ("probes", "accuracy", "scores"))
    assert float(rates[0]["rate"]) == zero["probes"]["word_salad"][
        "rate"
    ] and "ending ' Enjoy!'" in [row["probe"] for row in rates]
    assert [
        (row["slice"], float(row["accuracy"]), row["pairs"])
        for row in accuracies
        if "source" in row["slice"]
    ] == [("source unknown", accuracy["accuracy"], "18")]
    for name, told in zero["scores"].items():
        assert fmean(
            float(row["score"]) for row in scored if row["scored"] == name
        ) == pytest.approx(told["mean"], abs=1e-4)
    curve = table("curves")
    assert [row["step"] for row in curve] == ["1", "2"] and float(curve[1]["score"]) == zero[
        "best_of_n"
    ]["2"]["score"]


def test_phrases_of_the_round_before_are_tried(make_round):
    make_round("r0", 1.0)
    params = make_round("r1", 1.0)
    prompts = [
        {
            "update": 1,
            "id": "p",
            "prompt": "The trip",
            "kl": 1.0,
            "finish_reason": "stop",
            "length": 4,
        }
    ]
    praise = [row | {"response": " was fun. Bravo", "score": 5.0} for row in prompts * 4]
    dull = [row | {"response": " was a trip.", "score": 0.0} for row in prompts * 12]
    from stages.lib.data.rollouts import RolloutLog

    RolloutLog(Path("rounds/r0/ppo/rollouts")).append([*praise, *dull])
    main(params, "r1")
    told = metrics("r1")
    # in all of the top quarter (the four praising texts, and one of the fixture's eight " Enjoy!")
    # more often than elsewhere
    assert " Bravo" in " ".join(told["mined_text"]) and len(told["mined"]) == len(
        told["mined_text"]
    )
    assert told["mined"]["1"].keys() == {"rate", "low", "high", "pairs", "uplift", "judged"}


@pytest.mark.parametrize("max_length", [64, 8])
def test_two_pairs_are_measured_as_far_as_they_go(make_round, max_length):
    params = make_round("r0", 1.0)
    params.reward.max_length = max_length
    for name in ("pairs_eval", "sft_eval", "prompts_train"):
        write_jsonl(DATA / f"{name}.jsonl", read_jsonl(DATA / f"{name}.jsonl", "")[:2])
    main(params, "r0")
    told = metrics("r0")
    assert (
        told["length_correlation_partial"] is None or abs(told["length_correlation_partial"]) <= 1
    )
    # the two share their chosen text, so one is tried; with 8 tokens an ending would be cut off, so
    # none is
    texts = 1 if max_length == 64 else 0
    assert told["probes"]["empty"]["texts"] == texts and (told["worst_probe"] is None) == (
        texts == 0
    )
    assert told["probes"]["prompt_swapped"] == {"rate": None, "low": None, "high": None, "texts": 0}


def test_prompts_of_messages(make_round):
    params = make_round("r0", 1.0)
    for name in ("pairs_eval", "sft_eval", "prompts_train"):
        rows = read_jsonl(DATA / f"{name}.jsonl", "")
        write_jsonl(
            DATA / f"{name}.jsonl",
            [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows],
        )
    main(params, "r0")
    told = metrics("r0")
    assert told["judge_accuracy"] == 1.0 and told["probes"]["prompt_swapped"]["texts"] == 6
    assert read_jsonl(Path("rounds/r0/battery/samples.jsonl"), "")[0]["prompt"][0]["role"] == "user"


def test_how_far_the_members_of_an_ensemble_disagree(make_round):
    params, model = make_round("r0", 1.0), Path("rounds/r0/reward/model")
    main(params, "r0")
    alone = metrics("r0")
    shutil.copytree(model, work := Path("second"))
    for folder, changes in ((model, {"ensemble_reduce": "mean"}), (work, {"mean": 2.5})):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    shutil.copytree(work, model / "members/1")
    main(params, "r0")
    told = metrics("r0")
    # the same weights, centred at 2.5 instead of 0.5 with a deviation of 2: 1 lower, so that the
    # standard deviation of two is 1 / sqrt(2)
    assert (
        told["ensemble_disagreement"] == pytest.approx(0.70711, abs=1e-4)
        and "ensemble_disagreement" not in alone
    )
    assert told["scores"]["sft_samples"]["mean"] == pytest.approx(
        alone["scores"]["sft_samples"]["mean"] - 0.5, abs=1e-4
    )


def test_another_prompt_template_is_refused(make_round):
    params = make_round("r0", 1.0)
    Path("rounds/r0/reward/manifest.json").write_text('{"template_hash": "other"}')
    with pytest.raises(BadInput, match="template_hash"):
        main(params, "r0")


def test_how_often_the_judge_too_likes_the_text_with_the_ending_better():
    praised = ProbeResult("It", " was sad. Wonderful! Great!", 1.0, " was sad.", 0.0, 1.0)
    dotted = ProbeResult("It", " was sad..", 1.0, " was lovely.", 0.0, 1.0)
    assert judged([praised, dotted]) == 0.5 and judged([]) is None
