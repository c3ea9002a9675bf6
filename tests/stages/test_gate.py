"""Gates: what passes, what fails and how it says so; run as DVC runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.errors import BadInput, GateFailed
from stages.gate import run_gate
from stages.params import Params
from stages.records import write_json

SFT = {"loss_before": 5.17, "loss_after": 4.5}
REWARD = {"accuracy": 0.89, "accuracy_low": 0.85, "margin": 1.4, "baseline_longest": 0.47, "baseline_tfidf": 0.82}
EVALUATE = {"win_rate_low": 0.7, "sft": {"repetition_3": 0.03}, "ppo": {"kl": 6.3, "distinct_2": 0.72, "repetition_3": 0.06}}
METRICS = {"sft": ("sft", SFT), "reward": ("reward", REWARD), "promote": ("evaluate", EVALUATE)}


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run a gate on metrics; returns its verdict, and whether it is open."""
    monkeypatch.chdir(tmp_path)

    def run(gate: str, metrics: dict) -> tuple[dict, bool]:
        write_json(Path("rounds/r0") / METRICS[gate][0] / "metrics.json", metrics)
        try:
            run_gate(Params(), gate, "r0")
        finally:
            opened = Path(f"gates/r0/{gate}.ok").exists()
        return json.loads(Path(f"reports/r0/gate_{gate}.json").read_text()), opened

    return run


@pytest.mark.parametrize("gate", METRICS)
def test_good_numbers_pass(attempt, gate):
    verdict, opened = attempt(gate, METRICS[gate][1])
    assert opened and verdict["passed"] and all(check["passed"] for check in verdict["checks"])
    assert Path(f"gates/r0/{gate}.ok").read_text().strip() == "passed"


@pytest.mark.parametrize(
    ("gate", "change", "metric", "next_step"),
    [
        ("sft", {"loss_after": 5.1}, "loss_before - loss_after", "sft.num_train_epochs"),
        ("reward", {"accuracy_low": 0.79}, "accuracy_low", "reports/r0/data.json"),
        ("reward", {"margin": 0.4}, "margin", "reward.learning_rate"),
        ("reward", {"baseline_longest": 0.9}, "accuracy - baseline_longest", "length"),
        ("reward", {"baseline_tfidf": 0.89}, "accuracy - baseline_tfidf", "shortcuts"),
        ("promote", {"win_rate_low": 0.5}, "win_rate_low", "ppo.kl_coef"),
        ("promote", {"ppo": EVALUATE["ppo"] | {"kl": 8.1}}, "ppo.kl", "ppo.target_kl"),
        ("promote", {"ppo": EVALUATE["ppo"] | {"distinct_2": 0.4}}, "ppo.distinct_2", "raise ppo.kl_coef"),
        ("promote", {"ppo": EVALUATE["ppo"] | {"repetition_3": 0.09}}, "ppo.repetition_3", "ppo.response_length"),
    ],
)
def test_each_bad_number_fails_with_its_next_step(attempt, gate, change, metric, next_step):
    with pytest.raises(GateFailed) as failed:
        attempt(gate, METRICS[gate][1] | change)
    assert metric in str(failed.value) and next_step in str(failed.value)
    verdict = json.loads(Path(f"reports/r0/gate_{gate}.json").read_text())
    assert [check["metric"] for check in verdict["checks"] if not check["passed"]] == [metric]
    assert not verdict["passed"] and not Path(f"gates/r0/{gate}.ok").exists()


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        ("sft", {"loss_after": float("nan")}),
        ("sft", {"loss_before": float("inf")}),
        ("reward", {"accuracy_low": None}),
        ("reward", {"baseline_tfidf": float("nan")}),
        ("promote", {"ppo": {}}),
        ("promote", {"sft": {}}),
    ],
)
def test_missing_and_nan_never_pass(attempt, gate, change):
    with pytest.raises(GateFailed, match="missing"):
        attempt(gate, METRICS[gate][1] | change)


def test_a_gate_that_was_open_closes(attempt):
    attempt("sft", SFT)
    with pytest.raises(GateFailed):
        attempt("sft", SFT | {"loss_after": 6.0})
    assert not Path("gates/r0/sft.ok").exists()


def test_without_metrics_the_stage_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="dvc repro evaluate@r0"):
        run_gate(Params(), "promote", "r0")


@pytest.mark.parametrize(("loss_after", "code"), [(4.5, 0), (5.1, 3)])
def test_the_process_ends_with_its_code_and_loads_no_torch(tmp_path, loss_after, code):
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    write_json(tmp_path / "rounds/r0/sft/metrics.json", SFT | {"loss_after": loss_after})
    program = "import sys, runpy; sys.argv = ['gate', '--gate', 'sft']\ntry: runpy.run_module('stages.gate', run_name='__main__')\n"
    program += "finally: print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "False"
    assert ("GateFailed" in done.stderr) == (code == 3)
