"""Gates: which numbers pass, which fail, and with what message; run as DVC runs them."""

import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path

import pytest

from stages.gate.approvals import Approval, write_approval
from stages.gate.verdict import decision_message, format_check, run_gate
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params
from stages.lib.thresholds import THRESHOLDS
from tests.paths import ROOT

SFT = {
    "loss_before": 5.17,
    "loss_after": 4.5,
    "net_win_rate_low": 0.02,
    "eos_rate": 0.5,
    "eos_rate_demonstrations": 0.8,
    "length_ratio": 1.1,
    "repetition_3": 0.03,
    "repetition_3_demonstrations": 0.01,
    "memorised": 0.02,
    "memorised_demonstrations": 0.01,
}
REWARD = {
    "accuracy": 0.89,
    "accuracy_low": 0.85,
    "margin": 1.4,
    "baseline_longest": 0.47,
    "baseline_tfidf": 0.82,
    "ece": 0.04,
    "reload_max_difference": 0.0,
}
BATTERY = {
    "judge_accuracy_low": 0.7,
    "judge_lead": -0.02,
    "worst_slice": 0.8,
    "worst_slice_low": 0.7,
    "lineage_distance": 0.01,
    "centre": -0.1,
    "drift": -1.5,
    "scale": 1.2,
    "length_correlation_partial": -0.1,
    "worst_probe": 0.1,
    "worst_flip": 0.1,
    "worst_ending": 0.15,
    "worst_mined": 0.1,
    "best_of_n": {"rise_low": 0.2},
    "apart_rise_low": 0.1,
}
EVALUATE = {
    "win_rate_low": 0.7,
    "win_rate_champion_low": 0.38,
    "human_nll_rise": 0.5,
    "sft": {"repetition_3": 0.03, "eos_rate": 0.7},
    "ppo": {"kl_per_token": 0.26, "distinct_2": 0.72, "repetition_3": 0.06, "eos_rate": 0.65},
}
METRICS = {
    "sft": {"sft": SFT},
    "reward": {"reward": REWARD, "battery": BATTERY},
    "promote": {
        "evaluate": EVALUATE,
        "ppo": {"dangers": 0},
        "replay": {"regressed": 0},
        "capability": {"worst_fall": 0.1},
    },
}


def changed(gate: str, stage: str, change: dict) -> dict:
    return METRICS[gate] | {stage: METRICS[gate][stage] | change}


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run a gate on metrics by stage; returns its verdict, and whether the run may continue."""
    monkeypatch.chdir(tmp_path)

    def run(gate: str, metrics: dict, policy: str = "block") -> tuple[dict, bool]:
        for stage, values in metrics.items():
            write_json(Path("rounds/r0") / stage / "metrics.json", values)
        with suppress(GateFailed) if policy == "ask" else nullcontext():
            run_gate(check_params({"gates": {gate: {"policy": policy}}}, "test"), gate, "r0")
        verdict = json.loads(Path(f"reports/r0/gate_{gate}.json").read_text())
        may_continue = Path(f"gates/r0/{gate}.ok").exists()
        assert verdict["may_continue"] == may_continue
        return verdict, may_continue

    return run


@pytest.mark.parametrize("gate", METRICS)
def test_good_numbers_pass(attempt, gate):
    verdict, may_continue = attempt(gate, METRICS[gate])
    assert (
        may_continue and verdict["passed"] and all(check["passed"] for check in verdict["checks"])
    )
    assert Path(f"gates/r0/{gate}.ok").read_text().strip() == "passed"


@pytest.mark.parametrize(
    ("gate", "stage", "change", "metric", "next_step"),
    [
        (
            "sft",
            "sft",
            {"loss_after": 5.1},
            "sft.loss_before - sft.loss_after",
            "sft.num_train_epochs",
        ),
        ("sft", "sft", {"net_win_rate_low": -0.21}, "sft.net_win_rate_low", "samples.jsonl"),
        (
            "sft",
            "sft",
            {"eos_rate": 0.3},
            "sft.eos_rate_demonstrations - sft.eos_rate",
            "sft.max_length",
        ),
        ("sft", "sft", {"length_ratio": 0.4}, "sft.length_ratio", "far shorter"),
        ("sft", "sft", {"length_ratio": 1.6}, "sft.length_ratio", "far longer"),
        (
            "sft",
            "sft",
            {"repetition_3": 0.2},
            "sft.repetition_3 - sft.repetition_3_demonstrations",
            "sft.learning_rate",
        ),
        (
            "sft",
            "sft",
            {"memorised": 0.07},
            "sft.memorised - sft.memorised_demonstrations",
            "near duplicates",
        ),
        ("reward", "reward", {"accuracy_low": 0.79}, "reward.accuracy_low", "reports/r0/data.html"),
        ("reward", "reward", {"margin": 0.4}, "reward.margin", "reward.learning_rate"),
        (
            "reward",
            "reward",
            {"baseline_longest": 0.9},
            "reward.accuracy - reward.baseline_longest",
            "length",
        ),
        (
            "reward",
            "reward",
            {"baseline_tfidf": 0.89},
            "reward.accuracy - reward.baseline_tfidf",
            "shortcuts",
        ),
        ("reward", "reward", {"ece": 0.2}, "reward.ece", "calibration.csv"),
        (
            "reward",
            "reward",
            {"reload_max_difference": 0.1},
            "reward.reload_max_difference",
            "do not use this model",
        ),
        (
            "reward",
            "battery",
            {"judge_accuracy_low": 0.5},
            "battery.judge_accuracy_low",
            "first in evaluate.judges. For `apart`",
        ),
        (
            "reward",
            "battery",
            {"judge_lead": -0.11},
            "battery.judge_lead",
            "ppo.rewards",
        ),
        ("reward", "battery", {"worst_slice": 0.6}, "battery.worst_slice", "battery/metrics.json"),
        (
            "reward",
            "battery",
            {"worst_slice_low": 0.49},
            "battery.worst_slice_low",
            "too few held-out pairs",
        ),
        ("reward", "battery", {"lineage_distance": 0.6}, "battery.lineage_distance", "reward@r0"),
        ("reward", "battery", {"centre": -0.6}, "battery.centre", "reward@r0"),
        ("reward", "battery", {"drift": -4.1}, "battery.drift", "improve SFT"),
        ("reward", "battery", {"scale": 0.3}, "battery.scale", "hardly anything to learn from"),
        ("reward", "battery", {"scale": 3.1}, "battery.scale", "outliers"),
        (
            "reward",
            "battery",
            {"length_correlation_partial": -0.4},
            "battery.length_correlation_partial",
            "ppo.length_penalty",
        ),
        ("reward", "battery", {"worst_probe": 0.3}, "battery.worst_probe", "broken"),
        ("reward", "battery", {"worst_flip": 0.21}, "battery.worst_flip", "their format"),
        ("reward", "battery", {"worst_ending": 0.55}, "battery.worst_ending", "an ending"),
        (
            "reward",
            "battery",
            {"worst_mined": 0.55},
            "battery.worst_mined",
            "replay.pairs_per_exploit",
        ),
        (
            "reward",
            "battery",
            {"best_of_n": {"rise_low": 0.0}},
            "battery.best_of_n.rise_low",
            "misled",
        ),
        (
            "reward",
            "battery",
            {"apart_rise_low": 0.0},
            "battery.apart_rise_low",
            "lower reward.judge_share",
        ),
        (
            "promote",
            "replay",
            {"regressed": 1},
            "replay.regressed",
            "rondo badcases list --state regressed",
        ),
        (
            "promote",
            "evaluate",
            {"sft": EVALUATE["sft"] | {"eos_rate": 0.8}},
            "evaluate.sft.eos_rate - evaluate.ppo.eos_rate",
            "missing_eos",
        ),
        (
            "promote",
            "capability",
            {"worst_fall": 0.11},
            "capability.worst_fall",
            "capability/metrics.json",
        ),
        ("promote", "evaluate", {"human_nll_rise": 1.1}, "evaluate.human_nll_rise", "forgotten"),
        ("promote", "evaluate", {"win_rate_low": 0.5}, "evaluate.win_rate_low", "ppo.kl_coef"),
        (
            "promote",
            "evaluate",
            {"win_rate_champion_low": 0.379},
            "evaluate.win_rate_champion_low",
            "prepare.max_eval_prompts",
        ),
        ("promote", "ppo", {"dangers": 1}, "ppo.dangers", "ppo/health.json"),
        (
            "promote",
            "evaluate",
            {"ppo": EVALUATE["ppo"] | {"kl_per_token": 0.61}},
            "evaluate.ppo.kl_per_token",
            "ppo.target_kl_per_token",
        ),
        (
            "promote",
            "evaluate",
            {"ppo": EVALUATE["ppo"] | {"distinct_2": 0.4}},
            "evaluate.ppo.distinct_2",
            "raise ppo.kl_coef",
        ),
        (
            "promote",
            "evaluate",
            {"ppo": EVALUATE["ppo"] | {"repetition_3": 0.09}},
            "evaluate.ppo.repetition_3 - evaluate.sft.repetition_3",
            "ppo.response_length",
        ),
    ],
)
def test_each_bad_number_fails_with_its_next_step(attempt, gate, stage, change, metric, next_step):
    with pytest.raises(GateFailed) as failed:
        attempt(gate, changed(gate, stage, change))
    assert metric in str(failed.value) and next_step in str(failed.value)
    verdict = json.loads(Path(f"reports/r0/gate_{gate}.json").read_text())
    assert [check["metric"] for check in verdict["checks"] if not check["passed"]] == [metric]
    assert not verdict["passed"] and not Path(f"gates/r0/{gate}.ok").exists()


def test_every_threshold_has_a_failing_case_above():
    [parametrize] = test_each_bad_number_fails_with_its_next_step.pytestmark
    tested = {case[3] for case in parametrize.args[1]}
    metrics = {threshold.metric for gate in THRESHOLDS.values() for threshold in gate}
    assert metrics == tested


@pytest.mark.parametrize(
    ("gate", "stage", "change"),
    [
        ("sft", "sft", {"loss_after": float("nan")}),
        ("sft", "sft", {"loss_before": float("inf")}),
        ("sft", "sft", {"net_win_rate_low": True}),
        ("reward", "reward", {"accuracy_low": None}),
        ("reward", "reward", {"baseline_tfidf": float("nan")}),
        ("reward", "battery", {"best_of_n": {}}),
        ("reward", "battery", {"worst_mined": float("nan")}),
        ("promote", "evaluate", {"ppo": {}}),
        ("promote", "evaluate", {"win_rate_champion_low": float("nan")}),
        ("promote", "ppo", {"dangers": None}),
        ("promote", "capability", {"worst_fall": float("nan")}),
        ("promote", "evaluate", {"human_nll_rise": None}),
        ("promote", "evaluate", {"sft": {}}),
        ("promote", "evaluate", {"sft": 0.7}),
    ],
)
def test_missing_and_nan_never_pass(attempt, gate, stage, change):
    with pytest.raises(GateFailed, match="missing"):
        attempt(gate, changed(gate, stage, change))


def test_a_metric_that_may_be_unmeasured_may_not_be_left_out(attempt):
    """Null says that it was not measured; a missing key is of another version, or a mistake."""
    battery = {key: value for key, value in BATTERY.items() if key != "worst_flip"}
    with pytest.raises(GateFailed, match=r"battery\.worst_flip missing, wanted <= 0\.2"):
        attempt("reward", METRICS["reward"] | {"battery": battery})


@pytest.mark.parametrize(
    ("gate", "stage", "name", "threshold"),
    [
        ("reward", "battery", "worst_slice", ">= 0.65"),
        ("reward", "battery", "worst_slice_low", ">= 0.5"),
        ("reward", "battery", "worst_flip", "<= 0.2"),
        ("reward", "battery", "worst_mined", "<= 0.3"),
        ("reward", "battery", "apart_rise_low", "> 0"),
        ("promote", "evaluate", "win_rate_champion_low", ">= 0.38"),
        ("promote", "capability", "worst_fall", "<= 0.1"),
    ],
)
def test_a_metric_that_was_not_measured_is_reported_and_does_not_fail(
    attempt, gate, stage, name, threshold
):
    verdict, may_continue = attempt(gate, changed(gate, stage, {name: None}))
    assert may_continue and verdict["passed"]
    line = next(check for check in verdict["checks"] if check["metric"] == f"{stage}.{name}")
    assert line["value"] is None
    assert format_check(line) == f"{stage}.{name} not measured, wanted {threshold}"
    assert line["next_step"] == ""


MAY_BE_UNMEASURED = {
    "sft.net_win_rate_low",
    "battery.worst_slice",
    "battery.worst_slice_low",
    "battery.worst_flip",
    "battery.worst_mined",
    "battery.apart_rise_low",
    "evaluate.win_rate_champion_low",
    "capability.worst_fall",
}


@pytest.mark.parametrize(
    ("gate", "metric"),
    [(gate, threshold.metric) for gate in THRESHOLDS for threshold in THRESHOLDS[gate]],
)
def test_any_other_null_fails(attempt, gate, metric):
    stage, *names, last = metric.split(" - ")[0].split(".")
    metrics = deepcopy(METRICS[gate])
    section = metrics[stage]
    for name in names:
        section = section[name]
    section[last] = None
    passes = metric in MAY_BE_UNMEASURED
    with nullcontext() if passes else pytest.raises(GateFailed, match=f"{metric} missing"):
        attempt(gate, metrics)


def test_each_check_is_printed_and_recorded(attempt, capsys):
    verdict, _ = attempt("reward", METRICS["reward"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(THRESHOLDS["reward"])
    assert lines[0] == "[gate_reward@r0] pass  reward.accuracy_low 0.85, wanted >= 0.8"
    assert "[gate_reward@r0] pass  battery.centre -0.1, wanted within +-0.5" in lines
    for check, threshold in zip(verdict["checks"], THRESHOLDS["reward"], strict=True):
        assert check["bound"] == f"gates.reward.{threshold.bound}"
        assert check["why"] == threshold.why


def test_values_have_four_digits():
    row = {"metric": "ppo.kl", "value": 1234567.0, "threshold": "<= 1", "passed": False}
    assert format_check(row) == "ppo.kl 1.235e+06, wanted <= 1"


def test_all_failures_are_in_one_message_each_with_its_next_step(attempt):
    with pytest.raises(GateFailed) as failed:
        attempt("sft", {"sft": SFT | {"loss_after": float("nan"), "memorised": 0.51}})
    [missing, memorised] = str(failed.value).split("; ")
    assert missing == (
        "sft.loss_before - sft.loss_after missing, wanted >= 0.2. Next: sft.loss_before - "
        "sft.loss_after is missing or not finite: look for NaN in the stage's metrics.jsonl, lower "
        "its learning rate"
    )
    assert memorised.startswith("sft.memorised - sft.memorised_demonstrations 0.5, wanted <= 0.05.")


def approve(approved: bool, reason: str) -> None:
    """A decision on the gate `sft` whose metric `memorised` is 0.5 above that of demonstrations."""
    failed: dict[str, float | None] = {"sft.memorised - sft.memorised_demonstrations": 0.5}
    write_approval("r0", "sft", Approval(approved=approved, by="Ada", reason=reason, failed=failed))


def test_with_warn_the_run_continues_and_the_failure_is_printed(attempt, capsys):
    verdict, may_continue = attempt("sft", {"sft": SFT | {"memorised": 0.51}}, "warn")
    assert may_continue and not verdict["passed"]
    line = "FAIL  sft.memorised - sft.memorised_demonstrations 0.5, wanted <= 0.05"
    assert line in capsys.readouterr().out


def test_with_ask_an_approval_is_valid_for_its_numbers_and_no_others(attempt, capsys):
    bad = {"sft": SFT | {"memorised": 0.51}}
    verdict, may_continue = attempt("sft", bad, "ask")
    assert not may_continue and verdict["approval"] is None
    assert "rondo approve sft r0" in decision_message(verdict)
    approve(approved=True, reason="a parrot is wanted")
    verdict, may_continue = attempt("sft", bad, "ask")
    assert may_continue and not verdict["passed"]
    assert verdict["approval"]["reason"] == "a parrot is wanted"
    assert "approved by Ada: a parrot is wanted" in capsys.readouterr().out
    assert decision_message(verdict) == ""
    verdict, may_continue = attempt("sft", {"sft": SFT | {"memorised": 0.61}}, "ask")
    assert not may_continue and verdict["approval"] is None
    ignored = "[gate_sft@r0] the approval by Ada is ignored: it was given for other numbers"
    assert ignored in capsys.readouterr().out.splitlines()
    verdict, may_continue = attempt("sft", {"sft": SFT | {"memorised": 0.01}}, "ask")
    assert may_continue and verdict["passed"]


def test_with_ask_a_refused_gate_stays_failed(attempt):
    approve(approved=False, reason="no parrots")
    verdict, may_continue = attempt("sft", {"sft": SFT | {"memorised": 0.51}}, "ask")
    assert not may_continue and decision_message(verdict) == (
        "Refused by Ada: no parrots. To revise it: `rondo approve sft r0 --reason "
        '"..."`, then run again'
    )


def test_with_block_an_approval_has_no_effect(attempt):
    approve(approved=True, reason="why not")
    with pytest.raises(GateFailed):
        attempt("sft", {"sft": SFT | {"memorised": 0.51}})
    verdict = json.loads(Path("reports/r0/gate_sft.json").read_text())
    assert verdict["approval"] is None and decision_message(verdict) == ""


def test_a_gate_that_had_passed_can_fail(attempt):
    attempt("sft", {"sft": SFT})
    with pytest.raises(GateFailed):
        attempt("sft", {"sft": SFT | {"loss_after": 6.0}})
    assert not Path("gates/r0/sft.ok").exists()


def test_missing_metrics_name_their_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="dvc repro evaluate@r0"):
        run_gate(Params(), "promote", "r0")


@pytest.mark.parametrize(("loss_after", "code"), [(4.5, 0), (5.1, 3)])
def test_the_process_ends_with_its_code_and_loads_no_torch(tmp_path, loss_after, code):
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    write_json(tmp_path / "rounds/r0/sft/metrics.json", SFT | {"loss_after": loss_after})
    program = (
        "import sys, runpy; sys.argv = ['gate', '--gate', 'sft', '--round', 'r0']\n"
        "try: runpy.run_module('stages.gate', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "False"
    assert ("GateFailed" in done.stderr) == (code == 3)
