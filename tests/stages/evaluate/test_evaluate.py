"""Evaluation of a tiny round from disk, and its parts by hand."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.evaluate.__main__ import check_reproduced, main, rerun_policy
from stages.evaluate.evaluator import Evaluator, Sample
from stages.evaluate.results import describe, paired_win_rates, win_rate_with_prompts_needed
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.params import Params
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge, LexiconScores, lexicon_scores
from stages.lib.judging.pointwise import PointwiseJudge

KEYS = {
    "sentiment",
    "sentiment_plain",
    "score",
    "kl",
    "length",
    "eos_rate",
    "distinct_2",
    "repetition_3",
    "nll",
}


def sample(
    text: str,
    sentiment: float,
    score: float = 0.0,
    kl: float = 0.0,
    length: int = 4,
    ended: bool = True,
) -> Sample:
    return Sample(
        text, LexiconScores(sentiment, sentiment, 0.0), score, kl, -2.0 * length, length, ended
    )


def test_describe_by_hand():
    passes = [
        [sample("a b c", 0.5, 1.0, 2.0), sample("a b d", -0.5, 3.0, 4.0, ended=False)],
        [sample("x y", 0.2), sample("y x", 0.2)],
    ]
    told = describe(passes)
    assert told["sentiment"] == pytest.approx(0.1)
    assert told["score"] == 1.0
    assert told["kl"] == 1.5
    assert told["eos_rate"] == 0.75
    assert told["distinct_2"] == pytest.approx((3 / 4 + 1) / 2)  # ab bc bd of 4; xy yx of 2
    assert told["nll"] == pytest.approx(2.0)


GOOD, FAIR, BAD = " was wonderful.", " was fine.", " was awful."


def test_compare_pairs_prompts_and_counts_ties_half():
    texts = [[GOOD, FAIR], [GOOD, BAD]], [[BAD, FAIR], [BAD, GOOD], [GOOD, GOOD]]
    a, b = (
        [
            [
                replace(sample("", 0.0), text=text, judged=lexicon_scores(["It"], [text])[0])
                for text in each
            ]
            for each in side
        ]
        for side in texts
    )
    told = paired_win_rates(
        a,
        b,
        ["It", "It"],
        Jury({"lexicon": LexiconJudge(0.05), "short": PointwiseJudge("short", shortness, 0.0)}),
        Params(),
    )
    # prompt 1: win, win; prompt 2: tie, loss. The third pass has no partner.
    assert told["win_rate_lexicon"] == pytest.approx((2.5 / 4, 0.25, 1.0))
    assert told["win_rate_short"] == pytest.approx(
        (1.5 / 4, 0.0, 0.75)
    )  # of the opposite opinion, so that together they tie
    assert told["win_rate"] == (0.5, 0.5, 0.5)
    good, bad = (lexicon_scores(["It"], [text])[0].sentiment for text in (GOOD, BAD))
    assert told["sentiment_gain"][0] == pytest.approx((good - bad) / 4)


def shortness(prompts, responses):
    return [-float(len(response)) for response in responses]


def test_a_second_evaluation_that_differs_is_an_error():
    first = [sample("a", 0.0), sample("b", 0.0)]
    check_reproduced(first, list(first))
    with pytest.raises(RondoError, match="1 of 2 prompts, first on 1"):
        check_reproduced(first, [first[0], replace(first[1], score=0.1)])


def test_a_policy_that_changes_on_disk_is_not_reproduced(make_round):
    params = make_round("r0", 1.0)
    evaluator = Evaluator(params, "r0")
    first = evaluator.answer(evaluator.load_ppo(), 0)
    shutil.copytree(
        "rounds/r0/ppo/checkpoints/step_00002", "rounds/r0/ppo/policy", dirs_exist_ok=True
    )
    with pytest.raises(
        RondoError,
        match=r"in a fresh process the policy differs on 2 of 2 prompts, first on 0: .*score.*KL",
    ):
        check_reproduced(first, rerun_policy(params, "r0"))


def with_ppo(params: Params, **changes: object) -> Params:
    return params.model_copy(update={"ppo": params.ppo.model_copy(update=changes)})


def test_a_win_rate_that_is_undecided_says_how_many_prompts_it_needs(capsys):
    told = win_rate_with_prompts_needed("win_rate", (0.55, 0.45, 0.65), 100, "evaluate@r0")
    assert told == {
        "win_rate": 0.55,
        "win_rate_low": 0.45,
        "win_rate_high": 0.65,
        "win_rate_prompts_needed": 400,
    }
    assert (
        "win_rate 0.550 cannot decide with 100 prompts: about 400 would" in capsys.readouterr().out
    )
    assert (
        win_rate_with_prompts_needed("win_rate", (0.7, 0.6, 0.8), 100, "evaluate@r0")[
            "win_rate_prompts_needed"
        ]
        is None
    )
    assert capsys.readouterr().out == ""


def test_another_way_of_generating_or_judging_is_another_evaluation(make_round):
    def identity(params):
        main(params, "r0")
        manifest = json.loads(Path("rounds/r0/evaluate/manifest.json").read_text())
        assert (
            manifest["evaluation_id"]
            == json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())["evaluation_id"]
        )
        return manifest["evaluation_id"], manifest["evaluation"]

    params = make_round("r0", 1.0)
    (first, settings), (other, warmer) = (
        identity(params),
        identity(with_ppo(params, temperature=2.0)),
    )
    assert first != other and dict(settings.items() ^ warmer.items()).keys() == {"ppo.temperature"}


def test_a_round_and_its_champion(make_round):
    make_round("r0", 1.0)
    params = make_round("r1", -1.0)
    main(params, "r0")
    first = {path.name: path.read_bytes() for path in Path("rounds/r0/evaluate").iterdir()}
    main(params, "r0")
    assert first == {path.name: path.read_bytes() for path in Path("rounds/r0/evaluate").iterdir()}
    policy, sft = (Path("rounds/r0") / part for part in ("ppo/policy", "sft/model"))
    hashes = {str(path): file_hash(path) for path in (policy, sft)}
    write_json(Path("rounds/r1/champion/champion.json"), {"round": "r0", "hashes": hashes})
    main(params, "r1")
    metrics = json.loads(Path("rounds/r1/evaluate/metrics.json").read_text())
    zero = json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())

    # every model, with every metric; in the first round there is no champion
    assert all(metrics[name].keys() >= KEYS for name in ("base", "sft", "ppo", "champion"))
    names = ("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")
    assert "champion" not in zero and [zero[name] for name in names] == [None] * 3
    assert set(metrics["checkpoints"]) == {"step_00002", "step_00004"}
    assert metrics["reproduced"] is True and metrics["prompts"] == 2
    # perplexities of base and SFT are of the SFT stage's losses
    assert (metrics["base"].pop("ppl_human"), metrics["sft"].pop("ppl_human")) == pytest.approx(
        (math.exp(3.0), math.exp(2.0))
    )
    # base and SFT are the same weights here, policy and champion too, and the last checkpoint is
    # the policy
    assert metrics["sft"]["kl"] == 0.0 and metrics["base"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert (
        metrics["ppo"]["kl"] != 0.0
        and metrics["ppo"].pop("ppl_human") > 1
        and metrics["champion"] == metrics["ppo"]
    )
    assert metrics["checkpoints"]["step_00004"]["kl"] == metrics["ppo"]["kl"]
    assert [metrics[name] for name in names] == [0.5] * 3 and metrics["champion_round"] == "r0"
    # r1's reward model has the opposite taste: raw scores change sign around 0, calibrated (x - .5)
    # / 2
    assert zero["sft"]["score"] + metrics["sft"]["score"] == pytest.approx(-0.5, abs=1e-4)

    rows = [
        json.loads(line)
        for line in Path("rounds/r1/evaluate/samples.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 2 * 2
    assert all(row["base"] == row["sft"] for row in rows) and all(
        row["champion"] == row["ppo"] for row in rows
    )
    curve = list(csv.DictReader(Path("rounds/r1/evaluate/curves.csv").read_text().splitlines()))
    assert [row["step"] for row in curve] == ["0", "2", "4"]
    assert float(curve[0]["win_rate"]) == 0.5 and float(curve[2]["kl"]) == metrics["ppo"]["kl"]
    assert [float(row["sqrt_kl"]) ** 2 for row in curve] == pytest.approx(
        [max(float(row["kl"]), 0) for row in curve]
    )
    # at most two points away from SFT are too few for a fit; the measured peak is the curve's
    too_far, peak = metrics["overoptimisation"], max(curve, key=lambda row: float(row["sentiment"]))
    assert (
        too_far["points"] == sum(float(row["kl"]) > 0 for row in curve)
        and too_far["alpha"] is None
        and too_far["peak_kl"] is None
    )
    assert (too_far["measured_peak_update"], too_far["measured_peak_kl"]) == (
        int(peak["step"]),
        float(peak["kl"]),
    )
    # the policy and itself, its own champion, are equal: no number of prompts decides
    assert (
        metrics["win_rate_champion_prompts_needed"] is None
        and "win_rate_champion_prompts_needed" not in zero
    )
    assert metrics["evaluation_id"] == zero["evaluation_id"]

    shutil.copytree("rounds/r0/ppo/checkpoints/step_00002", policy, dirs_exist_ok=True)
    with pytest.raises(
        BadInput, match=r"rounds/r0/ppo/policy is not the version that became champion: run `dvc checkout"
    ):
        main(params, "r1")


def test_perplexity_of_human_text_agrees_with_transformers(make_round):
    main(make_round("r0", 1.0), "r0")
    metrics = json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained("assets/model")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("rounds/r0/sft/model", dtype=torch.float32),
        "rounds/r0/ppo/policy",
    ).eval()
    nll, tokens = 0.0, 0
    for line in Path("rounds/r0/prepare/data/sft_eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        answer = tokenizer(row["completion"] + tokenizer.eos_token, return_tensors="pt").input_ids
        labels = torch.cat([torch.full_like(prompt, -100), answer], 1)
        nll += model(torch.cat([prompt, answer], 1), labels=labels).loss.item() * answer.shape[1]
        tokens += answer.shape[1]
    assert metrics["ppo"]["ppl_human"] == pytest.approx(math.exp(nll / tokens), rel=1e-3)
    assert metrics["human_nll_rise"] == pytest.approx(
        nll / tokens - 2.0, abs=1e-3
    )  # 2 is the fixture's loss of SFT


def test_a_policy_of_all_weights_is_evaluated_like_its_adapter(make_round, adapter_and_whole):
    params = make_round("r0", 1.0)

    def measure():
        main(params, "r0")
        return json.loads(Path("rounds/r0/evaluate/metrics.json").read_text())["ppo"]

    adapter, whole = adapter_and_whole("r0", measure)
    assert whole == pytest.approx(adapter, rel=1e-4, abs=1e-4) and adapter["kl"] != 0.0


def test_a_changed_evaluation_set_is_refused(make_round):
    params = make_round("r0", 1.0)
    with Path("rounds/r0/prepare/data/eval_prompts.jsonl").open("a") as stream:
        stream.write('{"id": "q-new", "prompt": "New"}\n')
    with pytest.raises(BadInput, match="dvc repro prepare@r0"):
        main(params, "r0")


def test_another_prompt_template_is_refused(make_round):
    params = make_round("r0", 1.0)
    Path("rounds/r0/reward/manifest.json").write_text('{"template_hash": "other"}')
    with pytest.raises(BadInput, match="template_hash"):
        main(params, "r0")
