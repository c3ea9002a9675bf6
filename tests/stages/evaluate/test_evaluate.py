"""Evaluation of a tiny round from disk, and its parts against hand-worked values."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.execution import fork_server
from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.evaluate.__main__ import main
from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.evaluate.reproduce import check_reproduced, is_exact, rerun_policy
from stages.evaluate.results import (
    ModelResults,
    describe,
    interval_over_prompts,
    paired_outcomes,
    side_by_side,
    win_rate_with_prompts_needed,
)
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.params import Params
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import JURY
from stages.lib.judging.pointwise import PointwiseJudge
from stages.ppo.__main__ import main as ppo
from stages.replay.__main__ import main as replay
from stages.sft.__main__ import main as sft

KEYS = {"judge_score", "score", "kl", "length", "eos_rate", "distinct_2"}
KEYS |= {"repetition_3", "nll"}


def sample(
    text: str,
    score: float = 0.0,
    kl: float = 0.0,
    length: int = 4,
    ended: bool = True,
) -> Sample:
    return Sample([], [1] * length, text, ended, score, kl, -2.0 * length, kl + 1)


def test_describe_by_hand():
    passes = [
        [sample("a b c", 1.0, 2.0), sample("a b d", 3.0, 4.0, ended=False)],
        [sample("x y x y x", length=2), sample("y x")],
    ]
    means = describe(passes)
    assert means["score"] == 1.0
    assert (means["kl"], means["kl_anchor"]) == (1.5, 2.5)
    assert means["eos_rate"] == 0.75 and means["repetition_3"] == pytest.approx(1 / 12)
    assert means["distinct_2"] == pytest.approx((3 / 4 + 2 / 5) / 2)  # ab bc bd of 4; xy yx of 5
    assert means["nll"] == pytest.approx(2.0)


GOOD, FAIR, BAD = " was wonderful.", " was fine.", " was awful."


def one_pass(texts: list[str]) -> OneSamplePerPrompt:
    return [sample(text) for text in texts]


def test_win_rates_pair_samples_and_count_ties_half():
    a = [one_pass([GOOD, FAIR]), one_pass([GOOD, BAD])]
    b = [one_pass([BAD, FAIR]), one_pass([BAD, GOOD]), one_pass([GOOD, GOOD])]
    short = PointwiseJudge("short", shortness, 0.0)
    jury = Jury({"lexicon": LexiconJudge(0.05), "short": short})
    outcomes = paired_outcomes(a, b, ["It", "It"], jury)
    assert outcomes["lexicon"] == [[1.0, 0.5], [1.0, 0.0]]
    rates = {name: interval_over_prompts(values, Params()) for name, values in outcomes.items()}
    # prompt 1: win, win; prompt 2: tie, loss. B's third pass has no counterpart.
    assert rates["lexicon"] == pytest.approx((2.5 / 4, 0.25, 1.0))
    # this judge has the opposite opinion, so the two together always tie
    assert rates["short"] == pytest.approx((1.5 / 4, 0.0, 0.75))
    assert rates[JURY] == (0.5, 0.5, 0.5)


def test_the_rows_of_samples_have_numbers_of_each_response_and_the_jurys_outcome():
    """A checkpoint, whose metrics are elsewhere, is in no row."""
    lexicon, evaluator = Jury({"lexicon": LexiconJudge(0.05)}), SimpleNamespace(params=Params())
    results = ModelResults(evaluator, lexicon, {}, "r0")
    evaluator.prompts = ["It", "It"]
    results.samples = {
        "sft": [one_pass([BAD, FAIR]), one_pass([BAD, FAIR])],
        "ppo": [[sample(GOOD, 1.5, 2.0, 3), sample(BAD, -1.0, 4.0, 5)]],
        "step_00002": [one_pass([GOOD, GOOD])],
    }
    results.metrics = {"sft": {}, "ppo": {}, "step_00002": {}}
    for name in ("ppo", "step_00002"):
        results.win_rates(name, "sft")
    del results.metrics["step_00002"]
    rows = side_by_side([{"id": "a", "prompt": "It"}, {"id": "b", "prompt": "It"}], results)
    sft = {"sft_score": 0.0, "sft_kl": 0.0, "sft_length": 4}
    first = {"id": "a", "sample": 0, "prompt": "It", "sft": BAD, **sft}
    ppo = {"ppo": GOOD, "ppo_score": 1.5, "ppo_kl": 2.0, "ppo_length": 3}
    assert rows[0] == first | ppo | {"ppo_judge_score": 1.0, "ppo_against_sft": 1.0}
    assert rows[1] == first | {"sample": 1}  # the policy has one sample of each prompt
    assert rows[2]["ppo_against_sft"] == 0.0


def shortness(prompts, responses):
    return [-float(len(response)) for response in responses]


def test_a_second_evaluation_that_differs_is_an_error():
    first = [sample("a"), sample("b")]
    assert "all 2 prompts are equal" in check_reproduced(first, list(first), exact=True)
    for number in ("score", "kl", "ref_logprob"):
        other = replace(first[1], **{number: getattr(first[1], number) + 1e-7})
        with pytest.raises(RondoError, match="1 of 2 prompts, first on 1"):
            check_reproduced(first, [first[0], other], exact=True)


@pytest.mark.parametrize(
    ("device", "use_vllm", "exact"),
    [("cpu", False, True), ("cpu", True, False), ("cuda", False, False), ("cuda", True, False)],
)
def test_only_a_cpu_without_vllm_repeats_the_same_bits(device, use_vllm, exact):
    params = Params()
    params.model.use_vllm = use_vllm
    assert is_exact(params, torch.device(device)) is exact


def test_on_a_gpu_a_few_texts_may_differ_and_numbers_a_little():
    first = [sample(f"a {number}", 1.0, 2.0) for number in range(40)]
    others = [replace(one, tokens=[2], text="b", score=9.0) for one in first]
    compared = check_reproduced(first, others[:2] + first[2:], exact=False)  # 5%
    assert compared.startswith("38 of 40 texts are equal (at least 95% have to be)")
    with pytest.raises(RondoError, match="3 of 40 prompts, first on 0"):
        check_reproduced(first, others[:3] + first[3:], exact=False)
    longer = [replace(one, tokens=[*one.tokens, 1]) for one in first]  # the texts are the same
    with pytest.raises(RondoError, match="40 of 40 prompts"):
        check_reproduced(first, longer, exact=False)
    for number, value in (("score", 1.0), ("kl", 2.0), ("ref_logprob", first[0].ref_logprob)):
        close, far = value * 1.04, value * 1.06
        check_reproduced(first, [replace(one, **{number: close}) for one in first], exact=False)
        changed = [*first[:7], replace(first[7], **{number: far}), *first[8:]]
        with pytest.raises(RondoError, match="1 of 40 prompts, first on 7"):
            check_reproduced(first, changed, exact=False)


def test_a_policy_that_changes_on_disk_is_not_reproduced(make_round, monkeypatch):
    monkeypatch.delenv(fork_server.VARIABLE)  # here by the real interpreter
    params = make_round("r0", 1.0)
    evaluator = Evaluator(params, "r0")
    first = evaluator.sample(evaluator.load_ppo(), 0)
    other = "rounds/r0/ppo/checkpoints/step_00002"
    shutil.copytree(other, "rounds/r0/ppo/policy", dirs_exist_ok=True)
    message = r"in a fresh process the policy differs on 2 of 2 prompts, first on 0: .*score.*KL"
    with pytest.raises(RondoError, match=message):
        check_reproduced(first, rerun_policy(params, "r0"), exact=True)


def with_ppo(params: Params, **changes: object) -> Params:
    return params.model_copy(update={"ppo": params.ppo.model_copy(update=changes)})


def test_an_undecided_win_rate_reports_how_many_prompts_it_needs(capsys):
    metrics = win_rate_with_prompts_needed("win_rate", (0.55, 0.45, 0.65), 100, "evaluate@r0")
    assert metrics == {
        "win_rate": 0.55,
        "win_rate_low": 0.45,
        "win_rate_high": 0.65,
        "win_rate_prompts_needed": 400,
    }
    message = "win_rate 0.550 cannot decide with 100 prompts: about 400 would"
    assert message in capsys.readouterr().out
    decided = win_rate_with_prompts_needed("win_rate", (0.7, 0.6, 0.8), 100, "evaluate@r0")
    assert decided["win_rate_prompts_needed"] is None
    assert capsys.readouterr().out == ""


def read_json(path: str) -> dict:
    return json.loads(Path(path).read_text())


def test_another_way_of_sampling_or_judging_is_another_evaluation(make_round):
    def identity(params):
        main(params, "r0")
        manifest = read_json("rounds/r0/evaluate/manifest.json")
        metrics = read_json("rounds/r0/evaluate/metrics.json")
        assert manifest["evaluation_id"] == metrics["evaluation_id"]
        return manifest["evaluation_id"], manifest["evaluation"]

    params = make_round("r0", 1.0)
    first, settings = identity(params)
    other, warmer = identity(with_ppo(params, temperature=2.0))
    assert first != other
    assert dict(settings.items() ^ warmer.items()).keys() == {"ppo.temperature"}


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
    r0 = read_json("rounds/r0/evaluate/metrics.json")
    r1 = read_json("rounds/r1/evaluate/metrics.json")
    check_perplexity_of_human_text(r0)
    rounds = {"r0": r0, "r1": r1}  # whose reward models have opposite tastes
    efficiencies = {name: metrics["kl_efficiency"] for name, metrics in rounds.items()}
    assert 0 in efficiencies.values() and max(efficiencies.values()) > 0, efficiencies
    for metrics in rounds.values():
        check_kl_efficiency(metrics)

    # every model has every metric; in the first round there is no champion
    assert all(r1[name].keys() >= KEYS for name in ("base", "sft", "ppo", "champion"))
    names = ("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")
    assert "champion" not in r0 and [r0[name] for name in names] == [None] * 3
    assert set(r1["checkpoints"]) == {"step_00002", "step_00004"}
    assert r1["reproduced"] is True and r1["prompts"] == 2
    # the perplexities of base and SFT are exp of the SFT stage's losses
    perplexities = (r1["base"].pop("ppl_human"), r1["sft"].pop("ppl_human"))
    assert perplexities == pytest.approx((math.exp(3.0), math.exp(2.0)))
    # here base and SFT have the same weights, as have policy and champion, and the last checkpoint
    # has the policy's
    assert r1["sft"]["kl"] == 0.0 and r1["base"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert r1["ppo"]["kl"] != 0.0
    assert r1["ppo"].pop("ppl_human") > 1
    assert r1["champion"] == r1["ppo"]
    assert r1["checkpoints"]["step_00004"]["kl"] == r1["ppo"]["kl"]
    assert [r1[name] for name in names] == [0.5] * 3 and r1["champion_round"] == "r0"
    # r1's reward model has the opposite preference: raw scores have the opposite sign, and
    # calibrated ones are (x - 0.5) / 2
    assert r0["sft"]["score"] + r1["sft"]["score"] == pytest.approx(-0.5, abs=1e-4)
    # the policy is its own champion here: no number of prompts decides
    assert r1["win_rate_champion_prompts_needed"] is None
    assert "win_rate_champion_prompts_needed" not in r0
    assert r1["evaluation_id"] == r0["evaluation_id"]
    check_samples_and_curve(r1)

    shutil.copytree("rounds/r0/ppo/checkpoints/step_00002", policy, dirs_exist_ok=True)
    message = r"rounds/r0/ppo/policy is not the version in rounds/r1/champion/champion\.json: run"
    with pytest.raises(BadInput, match=message):
        main(params, "r1")


def check_kl_efficiency(metrics: dict) -> None:
    """By hand: best of 2 rises by 0.5 at log 2 - 1/2 nats."""
    slope = 0.5 / math.sqrt(math.log(2) - 0.5)
    rise = max(metrics["ppo"]["score"] - metrics["sft"]["score"], 0.0)
    expected = (rise / slope) ** 2 / metrics["ppo"]["kl"]
    names = ("kl_efficiency_low", "kl_efficiency", "kl_efficiency_high")
    low, efficiency, high = (metrics[name] for name in names)
    assert efficiency == pytest.approx(expected, rel=1e-4) and low <= efficiency <= high


def check_samples_and_curve(metrics: dict) -> None:
    lines = Path("rounds/r1/evaluate/samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 * 2
    assert all(row["base"] == row["sft"] for row in rows)
    assert all(row["champion"] == row["ppo"] for row in rows)
    curve = list(csv.DictReader(Path("rounds/r1/evaluate/curves.csv").read_text().splitlines()))
    assert [row["step"] for row in curve] == ["0", "2", "4"]
    assert float(curve[0]["win_rate"]) == 0.5 and float(curve[2]["kl"]) == metrics["ppo"]["kl"]
    for row in curve:  # an interval over prompts
        low, mean, high = (float(row[f"judge_score{end}"]) for end in ("_low", "", "_high"))
        assert low <= mean <= high
    assert [float(row["sqrt_kl"]) ** 2 for row in curve] == pytest.approx(
        [max(float(row["kl"]), 0) for row in curve]
    )
    # at most two points with KL > 0 are too few for a fit; the measured peak is the curve's
    fitted, peak = (
        metrics["overoptimisation"],
        max(curve, key=lambda row: float(row["judge_score"])),
    )
    assert fitted["points"] == sum(float(row["kl"]) > 0 for row in curve)
    assert fitted["alpha"] is None and fitted["peak_kl"] is None
    measured_peak = (fitted["measured_peak_update"], fitted["measured_peak_kl"])
    assert measured_peak == (int(peak["step"]), float(peak["kl"]))


def check_perplexity_of_human_text(metrics: dict) -> None:
    """As transformers computes it."""
    tokenizer = AutoTokenizer.from_pretrained("assets/model")
    sft = AutoModelForCausalLM.from_pretrained("rounds/r0/sft/model", dtype=torch.float32)
    model = PeftModel.from_pretrained(sft, "rounds/r0/ppo/policy").eval()
    nll, tokens = 0.0, 0
    for line in Path("rounds/r0/prepare/data/sft_eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        answer = tokenizer(row["completion"] + tokenizer.eos_token, return_tensors="pt").input_ids
        labels = torch.cat([torch.full_like(prompt, -100), answer], 1)
        nll += model(torch.cat([prompt, answer], 1), labels=labels).loss.item() * answer.shape[1]
        tokens += answer.shape[1]
    assert metrics["ppo"]["ppl_human"] == pytest.approx(math.exp(nll / tokens), rel=1e-3)
    # 2 is SFT's loss in the fixture
    assert metrics["human_nll_rise"] == pytest.approx(nll / tokens - 2.0, abs=1e-3)


def test_a_policy_of_all_weights_is_evaluated_like_its_adapter(make_round, adapter_and_whole):
    params = make_round("r0", 1.0)

    def measure():
        main(params, "r0")
        return read_json("rounds/r0/evaluate/metrics.json")["ppo"]

    adapter, whole = adapter_and_whole("r0", measure)
    assert whole == pytest.approx(adapter, rel=1e-4, abs=1e-4) and adapter["kl"] != 0.0


def test_a_changed_evaluation_set_is_refused(make_round):
    params = make_round("r0", 1.0)
    with Path("rounds/r0/prepare/data/eval_prompts.jsonl").open("a") as stream:
        stream.write('{"id": "q-new", "prompt": "New"}\n')
    with pytest.raises(BadInput, match="dvc repro prepare@r0"):
        main(params, "r0")


@pytest.mark.parametrize("stage", [sft, battery, ppo, main, replay])
def test_a_judge_that_was_edited_after_the_run_began_is_refused(make_round, stage):
    Path("mine.py").write_text("def score(prompts, responses):\n    return [0.0] * len(prompts)\n")
    params = make_round("r0", 1.0)
    evaluate = params.evaluate.model_copy(update={"judges": ["mine:score"]})
    params = params.model_copy(update={"evaluate": evaluate})
    inputs(params, "r0")
    with Path("mine.py").open("a") as stream:
        stream.write("# another judge\n")
    with pytest.raises(BadInput, match=r"^mine\.py changed after the run began"):
        stage(params, "r0")


@pytest.mark.parametrize("stage", [main, battery, replay])
def test_another_prompt_template_is_refused(make_round, stage):
    params = make_round("r0", 1.0)
    Path("rounds/r0/reward/manifest.json").write_text('{"template_hash": "other"}')
    with pytest.raises(BadInput, match="template_hash"):
        stage(params, "r0")
