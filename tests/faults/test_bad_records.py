"""Files that Rondo writes for itself, with one to three changes: metrics, verdicts, decisions,
champions, locks.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from flows.core import locks, verdicts
from flows.report import diagnosis, run_pages
from stages.gate.approvals import read_approval, read_rollback
from stages.gate.verdict import evaluate_gate, run_gate
from stages.lib.core import user_inputs
from stages.lib.core.champion import anchor_path, load_champion
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import read_json, write_json
from stages.lib.core.params import check_params
from stages.ppo.common.reference import check_reference_files
from tests.faults.bad import bad_bytes, bad_json, bad_jsonl, try_bad, writing
from tests.paths import ROOT
from tests.stages.gate.test_gate import BATTERY, REWARD

ASK = check_params({"gates": {"reward": {"policy": "ask"}}}, "test")
APPROVAL = {
    "approved": True,
    "by": "Ada é",
    "reason": "seen by hand",
    "failed": {"reward.accuracy_low": 0.5, "battery.ece": None},
}
ROLLBACK = {"by": "Ada", "reason": "it lies", "policy": "ab" * 32}
MANIFEST = {"stage": "sft", "round": "r0", "weights": None, "inputs": {"a": "b"}}
STEPS = [{"step": step, "loss": 1 / step, "kl": 0.5} for step in (1, 2, 3)]
LOCK = {
    "schema": "2.0",
    "stages": {
        "sft@r0": {
            "cmd": "python -m stages.sft --round r0",
            "deps": [{"path": "stages/sft", "md5": "ab12.dir", "size": 12, "nfiles": 3}],
            "params": {"params.yaml": {"sft.learning_rate": 0.001}},
            "outs": [{"path": "rounds/r0/sft/model", "md5": "cd34.dir", "size": 7}],
        }
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values_of(content: bytes) -> Any:
    return json.loads(content.decode("utf-8-sig"))


def test_metrics_of_a_gate() -> None:
    """A gate passes only if each number is one that is within its threshold."""
    write_json(Path("rounds/r0/battery/metrics.json"), BATTERY)

    def read() -> dict[str, Any]:
        verdict = evaluate_gate(ASK, "reward", "r0")
        try:
            run_gate(ASK, "reward", "r0")
        except GateFailed:
            assert not verdict["passed"]
        return verdict

    def check(content: bytes, verdict: dict[str, Any]) -> None:
        for row in verdict["checks"]:
            value = values_of(content)
            for key in row["metric"].removeprefix("reward.").split("."):
                value = value.get(key) if isinstance(value, dict) else None
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if row["metric"].startswith("reward.") and " - " not in row["metric"]:
                assert row["value"] is None or (is_number and row["value"] == float(value))
        json.dumps(verdict, allow_nan=False)

    file = "rounds/r0/reward/metrics.json"
    try_bad(bad_json(REWARD), writing(file, read), check, r"reward/metrics\.json")


def same_decision(content: bytes, decision: Any) -> None:
    values = values_of(content)
    assert (decision.by, decision.reason) == (values["by"], values["reason"])
    assert "failed" not in values or decision.failed.keys() == values["failed"].keys()


@pytest.mark.parametrize(
    ("file", "good", "read", "check"),
    [
        (
            "approvals/r0/reward.json",
            APPROVAL,
            lambda: read_approval("r0", "reward"),
            same_decision,
        ),
        ("approvals/r0/taken_back.json", ROLLBACK, lambda: read_rollback("r0"), same_decision),
        (
            "rounds/r0/sft/manifest.json",
            MANIFEST,
            lambda: check_reference_files(Path("rounds/r0/sft")),
            lambda content, _: values_of(content),
        ),
    ],
)
def test_records(
    file: str, good: Any, read: Callable[[], Any], check: Callable[[bytes, Any], object]
) -> None:
    Path("rounds/r0/sft/model").mkdir(parents=True)
    try_bad(bad_json(good), writing(file, read), check, Path(file).name.replace(".", r"\."))


def test_verdicts() -> None:
    shutil.copy(ROOT / "params.yaml", ".")
    write_json(Path("rounds/r0/reward/metrics.json"), REWARD | {"accuracy_low": 0.1})
    write_json(Path("rounds/r0/battery/metrics.json"), BATTERY)
    with pytest.raises(GateFailed):
        run_gate(ASK, "reward", "r0")
    file = "reports/r0/gate_reward.json"
    good = read_json(Path(file), "")

    def read() -> Any:
        verdict = verdicts.read_gate("r0", "reward")
        verdicts.gate_message("r0", "reward")
        diagnosis.verdict_lines(["r0"], {"reward@r0": {}, "battery@r0": {}})
        return verdict

    def check(content: bytes, verdict: Any) -> None:
        assert verdict["passed"] is values_of(content)["passed"]

    try_bad(bad_json(good), writing(file, read), check, r"gate_reward\.json")


def test_champions() -> None:
    for name in ("sft/model", "ppo/policy"):
        write_json(Path(f"rounds/r0/{name}/config.json"), {})
    digest = user_inputs.file_hash(Path("rounds/r0/ppo/policy"))
    hashes = {"rounds/r0/ppo/policy": digest, "rounds/r0/sft/model": digest}
    good = {"round": "r0", "hashes": hashes, "anchor": {"rounds/r0/sft/model": digest}}

    def check(content: bytes, result: Any) -> None:
        champion, anchor = result
        assert values_of(content)["round"] == (champion.round if champion else None)
        assert anchor.is_relative_to("rounds")

    read = writing(
        "rounds/r1/champion/champion.json", lambda: (load_champion("r1"), anchor_path("r1"))
    )
    try_bad(bad_json(good), read, check, r"champion\.json")


def test_dvc_lock() -> None:
    def check(content: bytes, entries: Any) -> None:
        text = content.decode("utf-8-sig")
        try:  # libyaml takes a tab within a text, ruamel an empty key
            document = yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            document = YAML(typ="safe", pure=True).load(text)
        assert entries.keys() == document["stages"].keys()

    inputs = bad_bytes(yaml.safe_dump(LOCK, sort_keys=False).encode()) | bad_json(LOCK)
    try_bad(inputs, writing("dvc.lock", locks.read_locks), check, r"dvc\.lock")


def test_steps_of_a_stage() -> None:
    file = "rounds/r0/sft/metrics.jsonl"
    read = writing(file, lambda: run_pages.progress("r0", "sft"))

    def check(content: bytes, line: str) -> None:
        complete = content[: content.rfind(b"\n") + 1]
        steps = [json.loads(row)["step"] for row in complete.split(b"\n") if row.strip()]
        assert line.startswith(f": step {steps[-1]}") if steps else line == ""

    try_bad(bad_jsonl(STEPS), read, check, r"metrics\.jsonl")


def place_broken_link(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("place", [Path.mkdir, os.mkfifo, place_broken_link])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.json", lambda path: read_json(path, "dvc repro sft@r0")),
        ("dvc.lock", lambda path: locks.read_locks()),
    ],
)
def test_what_is_no_file(
    place: Callable[[Path], None], name: str, read: Callable[[Path], Any]
) -> None:
    place(Path(name))
    if place is place_broken_link and name == "dvc.lock":
        assert read(Path(name)) == {}  # a link to nothing is no file
        return
    with pytest.raises(BadInput, match=rf"{name}.*(expected a file|cannot be read|missing)"):
        read(Path(name))
