"""Settings and files of older versions, read under today's names."""

import json
import re
from pathlib import Path

import pytest
import yaml

from flows.core.config import resolve, write_params
from flows.core.verdicts import failed_checks, read_gate
from flows.report.round_data import columns
from flows.tracking.records import Promotion
from stages.gate.approvals import read_approval
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params, load_params
from stages.lib.core.recorder import read_metrics
from stages.lib.core.renamed import METRICS, PARAMS, PER_TOKEN, current_name
from stages.lib.data.rollouts import RolloutLog, read_rollouts
from tests.paths import ROOT

OLD_SETTINGS = {
    "replay": {"judge_low": 0.25},
    "gates": {"sft": {"judged_gain": -0.5}},
    "evaluate": {"batch_size": 8},
    "ppo": {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "temperature": 0.8},
}


def test_the_table_for_users_has_all_names() -> None:
    table = re.findall(r"\| `(\S+)` \| `(\S+)` \|", (ROOT / "docs/renamed.md").read_text())
    assert table == [*PARAMS.items(), *PER_TOKEN.items(), *METRICS.items()]


def test_no_old_name_is_in_use() -> None:
    code = "".join(
        path.read_text()
        for top in ("stages", "flows")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "renamed.py"
    )
    # `sentiment` is still the lexicon's score of a text
    for old in METRICS.keys() - {"lost", "vouched", "sentiment"}:
        assert f'"{old}"' not in code and f".{old}" not in code


def test_old_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(OLD_SETTINGS))
    read = load_params()
    assert (read.replay.sentiment_low, read.gates.sft.net_win_rate) == (0.25, -0.5)
    assert read.model.use_vllm and read.model.vllm_gpu_memory_utilization == 0.4
    assert read.ppo.temperature == 0.8 and read.model.dtype == Params().model.dtype
    changed = resolve(settings=["replay.judge_low=0.5"])
    assert (changed.replay.sentiment_low, changed.gates.sft.net_win_rate) == (0.5, -0.5)
    changes = write_params(changed)
    assert {"replay.sentiment_low null -> 0.5", "replay.judge_low removed"} <= set(changes)


def test_old_budgets_of_a_sequence_are_divided_by_the_response_length() -> None:
    old = {
        "ppo": {"max_kl": 8.0, "target_kl": 4.0, "min_kl": 0.5},
        "gates": {"promote": {"max_kl": 12.0}},
    }
    long = old | {"ppo": old["ppo"] | {"response_length": 16}}
    for values, tokens in ((old, 24), (long, 16)):
        read = check_params(values, "params.yaml")
        budgets = read.ppo.max_kl_per_token, read.ppo.target_kl_per_token
        assert budgets == (8 / tokens, 4 / tokens)
        assert read.ppo.min_kl_per_token == 0.5 / tokens
        assert read.gates.promote.max_kl_per_token == 12 / tokens


def test_an_old_budget_that_is_no_number_is_refused_under_its_new_name() -> None:
    for ppo in ({"max_kl": "far"}, {"max_kl": 8.0, "response_length": "long"}):
        with pytest.raises(BadInput, match=r"ppo\.(max_kl_per_token|response_length)"):
            check_params({"ppo": ppo}, "params.yaml")


def test_an_old_setting_beside_its_new_one_is_refused() -> None:
    settings = {"replay": {"judge_low": 0.25, "sentiment_low": 0.0}}
    with pytest.raises(BadInput, match=r"replay\.judge_low: Extra inputs"):
        check_params(settings, "params.yaml")


def test_unknown_settings_are_refused_as_before() -> None:
    for settings in ({"gates": None}, {"gates": {"sft": 1}}, {"replay": {"judge": 1}}):
        with pytest.raises(BadInput):
            check_params(settings, "params.yaml")
    assert check_params({}, "params.yaml") == Params()


def test_old_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("rounds/r0/sft/metrics.json"), {"judge_mean": 0.1, "loss": 2.0})
    assert read_metrics("r0", "sft") == {"judge_score_mean": 0.1, "loss": 2.0}
    check = {"metric": "m", "value": 1.0, "band": "> 2", "passed": False, "next_step": "Wait"}
    old = {"gate": "sft", "round": "r0", "policy": "block", "passed": False, "opened": False}
    write_json(Path("reports/r0/gate_sft.json"), old | {"approval": None, "checks": [check]})
    verdict = read_gate("r0", "sft")
    assert verdict is not None and verdict["may_continue"] is False
    assert failed_checks(verdict) == ["m 1, wanted > 2. Wait"]
    approval = {"approved": True, "by": "Ana", "reason": "seen"}
    failed = {"battery.sentiment_accuracy": -0.1}
    write_json(Path("approvals/r0/sft.json"), approval | {"failed": failed})
    read = read_approval("r0", "sft")
    assert read is not None and read.holds_for({"battery.judge_accuracy": -0.1})
    Path("curves.csv").write_text("step,judge_mean\n1,0.5\n")
    assert columns(Path("curves.csv")) == {"step": [1.0], "judge_score_mean": [0.5]}


def test_old_rollouts_are_read(tmp_path: Path) -> None:
    row = {"update": 1, "id": "a", "prompt": "p", "response": "r", "score": 1.0, "reward": 1.0}
    row |= {"kl": 0.1, "finish_reason": "stop", "length": 3}
    RolloutLog(tmp_path).append([row | {"judge": 0.5}, row | {"sentiment": 0.25}])
    assert list(read_rollouts(tmp_path, "make it")) == [
        row | {"judge_score": n} for n in (0.5, 0.25)
    ]


def test_an_unsent_promotion_of_an_older_version_keeps_its_verdict() -> None:
    record = json.dumps({"digest": "d", "vouched": False, "evidence": {}})
    assert Promotion.model_validate_json(record).passed_or_approved is False


def test_the_name_of_a_step_keeps_its_round() -> None:
    assert current_name("r0/judge_mean") == "r0/judge_score_mean"
    assert current_name("evaluate.ppo.sentiment") == "evaluate.ppo.judge_score"
