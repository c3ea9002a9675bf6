"""Gates: which numbers pass, which fail, and with what message; run as DVC runs them."""

import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from copy import deepcopy
from pathlib import Path

import pytest

from flows.core.config import overlay
from stages.gate.approvals import Approval, write_approval
from stages.gate.thresholds import markdown
from stages.gate.verdict import decision_message, evaluate_gate, format_check, run_gate
from stages.gate.verdict import setting as setting_to_try
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.gates import GatesParams
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


LATER = {"rounds": {"r0": {"previous": "rounds/q"}}}
GATE_OF = {stage: gate for gate, stages in METRICS.items() for stage in stages}


def with_value(name: str, value: object) -> tuple[str, dict]:
    """The gate that reads a metric, and good metrics of its stages but for this one."""
    *path, last = name.split(".")
    gate = GATE_OF[path[0]]
    section = metrics = deepcopy(METRICS[gate])
    for key in path:
        section = section[key]
    section[last] = value
    return gate, metrics


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run a gate on metrics by stage; returns its verdict, and whether the run may continue."""
    monkeypatch.chdir(tmp_path)

    def run(
        gate: str, metrics: dict, policy: str = "block", settings: dict | None = None
    ) -> tuple[dict, bool]:
        for stage, values in metrics.items():
            write_json(Path("rounds/r0") / stage / "metrics.json", values)
        with suppress(GateFailed) if policy == "ask" else nullcontext():
            params = check_params({"gates": {gate: {"policy": policy}}} | (settings or {}), "test")
            run_gate(params, gate, "r0")
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


# what is checked, and a value that fails it, of the whole or of a part of it
FAILING = [
    ("sft.loss_before - sft.loss_after", "sft.loss_after", 5.1),
    ("sft.net_win_rate_low", None, -0.21),
    ("sft.eos_rate_demonstrations - sft.eos_rate", "sft.eos_rate", 0.3),
    ("sft.length_ratio", None, 0.4),
    ("sft.length_ratio", None, 1.6),
    ("sft.repetition_3 - sft.repetition_3_demonstrations", "sft.repetition_3", 0.2),
    ("sft.memorised - sft.memorised_demonstrations", "sft.memorised", 0.07),
    ("reward.accuracy_low", None, 0.79),
    ("reward.margin", None, 0.4),
    ("reward.accuracy - reward.baseline_longest", "reward.baseline_longest", 0.9),
    ("reward.accuracy - reward.baseline_tfidf", "reward.baseline_tfidf", 0.89),
    ("reward.ece", None, 0.2),
    ("reward.reload_max_difference", None, 0.1),
    ("battery.judge_accuracy_low", None, 0.5),
    ("battery.judge_lead", None, -0.11),
    ("battery.worst_slice", None, 0.6),
    ("battery.worst_slice_low", None, 0.49),
    ("battery.lineage_distance", None, 0.6),
    ("battery.centre", None, -0.6),
    ("battery.drift", None, -4.1),
    ("battery.scale", None, 0.3),
    ("battery.scale", None, 3.1),
    ("battery.length_correlation_partial", None, -0.4),
    ("battery.worst_probe", None, 0.3),
    ("battery.worst_flip", None, 0.21),
    ("battery.worst_ending", None, 0.55),
    ("battery.worst_mined", None, 0.55),
    ("battery.best_of_n.rise_low", None, 0.0),
    ("battery.apart_rise_low", None, 0.0),
    ("replay.regressed", None, 1),
    ("evaluate.sft.eos_rate - evaluate.ppo.eos_rate", "evaluate.sft.eos_rate", 0.8),
    ("capability.worst_fall", None, 0.11),
    ("evaluate.human_nll_rise", None, 1.1),
    ("evaluate.win_rate_low", None, 0.5),
    ("evaluate.win_rate_champion_low", None, 0.379),
    ("ppo.dangers", None, 1),
    ("evaluate.ppo.kl_per_token", None, 0.61),
    ("evaluate.ppo.distinct_2", None, 0.4),
    ("evaluate.ppo.repetition_3 - evaluate.sft.repetition_3", "evaluate.ppo.repetition_3", 0.09),
]


@pytest.mark.parametrize(("metric", "part", "value"), FAILING)
def test_each_bad_number_fails_with_its_next_step(attempt, metric, part, value):
    gate, metrics = with_value(part or metric, value)
    with pytest.raises(GateFailed) as failed:
        attempt(gate, metrics)
    verdict = json.loads(Path(f"reports/r0/gate_{gate}.json").read_text())
    [check] = [check for check in verdict["checks"] if not check["passed"]]
    assert check["metric"] == metric
    fixes = [
        (one.fault, one.fix.format(round="r0")) for one in THRESHOLDS[gate] if one.metric == metric
    ]
    assert (check["fault"], check["next_step"]) in fixes
    failure = f"{format_check(check)}: {check['fault']}. {check['next_step']}"
    assert failure in str(failed.value)
    assert not verdict["passed"] and not Path(f"gates/r0/{gate}.ok").exists()


def test_the_lineage_of_a_reward_model_that_was_given_is_a_warning(attempt, capsys):
    gate, metrics = with_value("battery.lineage_distance", 1.4)
    verdict, may_continue = attempt(gate, metrics, settings={"reward": {"model": "mine/rm"}})
    assert may_continue and verdict["passed"]
    [warning] = [check for check in verdict["checks"] if check["fault"]]
    assert warning["metric"] == "battery.lineage_distance" and warning["passed"]
    printed = capsys.readouterr().out
    assert "warn  battery.lineage_distance 1.4, wanted <= 0.5: it does not descend from" in printed
    assert "Train it from this round's SFT model" in printed
    # but one that could not be measured fails, and so does any other line
    for name, value in (("battery.lineage_distance", float("nan")), ("reward.margin", 0.4)):
        with pytest.raises(GateFailed, match=name):
            attempt(*with_value(name, value), settings={"reward": {"model": "mine/rm"}})


def test_every_threshold_has_a_failing_case_above():
    thresholds = [one.metric for gate in THRESHOLDS.values() for one in gate]
    assert sorted(thresholds) == sorted(metric for metric, _, _ in FAILING)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sft.loss_after", float("nan")),
        ("sft.loss_before", float("inf")),
        ("sft.net_win_rate_low", True),
        ("reward.baseline_tfidf", float("nan")),
        ("battery.best_of_n", {}),
        ("battery.worst_mined", float("nan")),
        ("evaluate.ppo", {}),
        ("evaluate.sft", 0.7),
    ],
)
def test_missing_and_nan_never_pass(attempt, name, value):
    with pytest.raises(GateFailed, match="missing"):
        attempt(*with_value(name, value))


def test_a_metric_that_may_be_unmeasured_may_not_be_left_out(attempt):
    """Null says that it was not measured; a missing key is of another version, or a mistake."""
    battery = {key: value for key, value in BATTERY.items() if key != "worst_flip"}
    with pytest.raises(GateFailed, match=r"battery\.worst_flip missing, wanted <= 0\.2"):
        attempt("reward", METRICS["reward"] | {"battery": battery})


MAY_BE_UNMEASURED = {
    "sft.net_win_rate_low": ">= -0.2",
    "battery.worst_slice": ">= 0.65",
    "battery.worst_slice_low": ">= 0.5",
    "battery.worst_flip": "<= 0.2",
    "battery.worst_mined": "<= 0.3",
    "battery.apart_rise_low": "> 0",
    "evaluate.win_rate_champion_low": ">= 0.38",
    "capability.worst_fall": "<= 0.1",
    "evaluate.human_nll_rise": "<= 1",
}


@pytest.mark.parametrize("metric", sorted({metric for metric, _, _ in FAILING}))
def test_a_metric_that_was_not_measured_is_reported_and_any_other_null_fails(attempt, metric):
    gate, metrics = with_value(metric.split(" - ")[0], None)
    if metric not in MAY_BE_UNMEASURED:
        with pytest.raises(GateFailed, match=f"{metric} missing"):
            attempt(gate, metrics)
        return
    verdict, may_continue = attempt(gate, metrics)
    assert may_continue and verdict["passed"]
    [line] = [check for check in verdict["checks"] if check["metric"] == metric]
    assert (line["value"], line["fault"], line["next_step"]) == (None, "", "")
    assert format_check(line) == f"{metric} not measured, wanted {MAY_BE_UNMEASURED[metric]}"


def test_a_gate_whose_stages_measured_nothing_does_not_judge(attempt, capsys):
    nothing = {stage: {"not_measured": f"no {stage}"} for stage in ("reward", "battery")}
    verdict, may_continue = attempt("reward", nothing)
    assert may_continue and verdict["not_judged"] == "no reward"
    assert {check["value"] for check in verdict["checks"]} == {None}
    assert "[gate_reward@r0] not judged: no reward\n" in capsys.readouterr().out
    # what one stage measured is judged, also if the other had nothing to measure
    verdict, may_continue = attempt("reward", METRICS["reward"] | {"battery": nothing["battery"]})
    assert may_continue and "not_judged" not in verdict
    bad = {"reward": METRICS["reward"]["reward"] | {"ece": 0.5}, "battery": nothing["battery"]}
    with pytest.raises(GateFailed, match=r"reward.ece 0.5, wanted <= 0.1"):
        attempt("reward", bad)


def test_each_check_is_printed_and_recorded(attempt, capsys):
    verdict, _ = attempt("reward", METRICS["reward"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(THRESHOLDS["reward"])
    assert lines[0] == "[gate_reward@r0] pass  reward.accuracy_low 0.85, wanted >= 0.8"
    assert "[gate_reward@r0] pass  battery.centre -0.1, wanted within +-0.5" in lines
    for check, threshold in zip(verdict["checks"], THRESHOLDS["reward"], strict=True):
        assert check["bound"] == f"gates.reward.{threshold.bound}"
        assert (check["why"], check["name"]) == (threshold.why, threshold.name)
        assert check["passed"] and not (check["fault"] or check["next_step"] or check["setting"])


def test_values_have_four_digits():
    row = {"metric": "ppo.kl", "value": 1234567.0, "threshold": "<= 1", "passed": False}
    assert format_check(row) == "ppo.kl 1.235e+06, wanted <= 1"


def test_all_failures_are_in_one_message_each_with_its_next_step(attempt):
    with pytest.raises(GateFailed) as failed:
        attempt("sft", {"sft": SFT | {"loss_after": float("nan"), "memorised": 0.51}})
    [missing, memorised] = str(failed.value).split("; ")
    assert missing == (
        "sft.loss_before - sft.loss_after missing, wanted >= 0.2: sft.loss_before - "
        "sft.loss_after is missing or not finite. Look for NaN in the stage's metrics.jsonl, lower "
        "its learning rate"
    )
    assert memorised.startswith("sft.memorised - sft.memorised_demonstrations 0.5, wanted <= 0.05:")


@pytest.mark.parametrize(
    ("params", "loss_after", "fault", "setting"),
    [
        ({}, 5.1, "it learnt too little", "sft.num_train_epochs=1.4"),
        ({"sft": {"num_train_epochs": 1.5}}, 5.1, "it learnt too little", "sft.num_train_epochs=3"),
        # these decide how long the stage trains
        ({"sft": {"max_steps": 4}}, 5.1, "it learnt too little", "sft.max_steps=8"),
        (LATER, 5.1, "it learnt too little", "sft.continue_epochs=0.5"),
        (
            LATER | {"sft": {"continue_epochs": None}},
            5.1,
            "it learnt too little",
            "sft.num_train_epochs=1.4",
        ),
        # a loss that rose needs less training, not more
        (
            {"sft": {"learning_rate": 1e-4}},
            5.3,
            "its loss on held-out demonstrations rose",
            "sft.learning_rate=5e-05",
        ),
        # no number to change
        ({}, float("nan"), "sft.loss_before - sft.loss_after is missing or not finite", ""),
    ],
)
def test_a_failed_check_names_the_setting_to_try_first(
    tmp_path, monkeypatch, params, loss_after, fault, setting
):
    monkeypatch.chdir(tmp_path)
    metrics = SFT | {"loss_after": loss_after}
    write_json(Path("rounds/r0/sft/metrics.json"), metrics)
    values = overlay(Params().model_dump(mode="json"), params)
    check = evaluate_gate(check_params(values, "params"), "sft", "r0")["checks"][0]
    assert (check["fault"], check["setting"]) == (fault, setting)


@pytest.mark.parametrize(
    ("change", "params", "setting"),
    [
        (("sft.num_train_epochs", 0.5), {"sft": {"max_steps": 1}}, ""),  # it cannot be smaller
        (("ppo.kl_coef", 2), {"ppo": {"kl_coef": 0.05}}, "ppo.kl_coef=0.1"),
        # from the second round on, the reward model starts from the SFT model by default
        (("reward.num_train_epochs", 2), LATER, "reward.num_train_epochs=2"),
        (
            ("reward.num_train_epochs", 2),
            LATER | {"reward": {"init_from": "previous"}},
            "reward.continue_epochs=1",
        ),
        (("ppo.kl_coef", 2), {"algorithm": "dpo"}, ""),  # which does not read it
        (("ppo.missing_eos_penalty", 2), {"ppo": {"missing_eos_penalty": 0.0}}, ""),
    ],
)
def test_a_setting_without_effect_is_not_named(change, params, setting):
    values = overlay(Params().model_dump(mode="json"), params)
    assert setting_to_try(change, check_params(values, "params"), "r0") == setting


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


def test_the_table_of_a_gate_has_a_line_per_threshold() -> None:
    lines = markdown("reward", GatesParams()).split("\n")
    assert lines[:2] == ["| metric | threshold | why | if it fails |", "|---|---|---|---|"]
    assert len(lines) == 2 + len(THRESHOLDS["reward"])
    [centre] = [one for one in THRESHOLDS["reward"] if one.metric == "battery.centre"]
    cells = f"within +-0.5<br>`gates.reward.centre` | {centre.why} | {centre.fault}. {centre.fix}"
    assert f"| `battery.centre` | {cells} |" in lines
