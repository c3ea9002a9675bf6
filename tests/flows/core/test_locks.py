"""Which stages of dvc.lock have results: the chain sft -> gate_sft -> reward -> ppo of r0."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.core.locks import current_locks
from stages.lib.core.files import write_json, write_text

STAGES = ("sft", "gate_sft", "reward", "ppo")
LOSS = '{"loss": 1}'
MD5 = hashlib.md5(LOSS.encode()).hexdigest()


def made(path: str, md5: str = "a") -> dict[str, str]:
    return {"path": path, "md5": md5}


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A finished round in a clone: git has the metrics, and no model."""
    monkeypatch.chdir(tmp_path)
    folders = {name: f"rounds/r0/{name}" for name in ("sft", "reward", "ppo")}
    for folder in folders.values():
        write_text(Path(folder, "metrics.json"), LOSS)
    outs = {
        name: [made(f"{folder}/model"), made(f"{folder}/metrics.json", MD5)]
        for name, folder in folders.items()
    } | {"gate_sft": [made("gates/r0/sft.ok")]}
    deps = {
        "sft": [made("stages/sft", "code")],
        "gate_sft": [made("rounds/r0/sft/metrics.json", MD5)],
        "reward": [made("gates/r0/sft.ok"), made("rounds/r0/sft/model")],
        "ppo": [made("rounds/r0/reward/model")],
    }
    return {f"{name}@r0": {"deps": deps[name], "outs": outs[name]} for name in STAGES}


def current(entries: dict[str, Any], **options: Any) -> set[str]:
    write_text(Path("dvc.lock"), yaml.safe_dump({"stages": entries}))
    return {address.partition("@")[0] for address in current_locks(**options)}


def test_a_clone_has_the_results_of_the_run_that_is_committed(entries: dict[str, Any]) -> None:
    assert current(entries) == {*STAGES}


def test_files_made_before_a_stage_ran_again_are_no_results(entries: dict[str, Any]) -> None:
    entries["sft@r0"]["outs"][0]["md5"] = "b"  # its model; the gate reads the metrics alone
    assert current(entries) == {"sft", "gate_sft"}


def test_a_stage_that_failed_has_no_results_and_no_stage_after_it(entries: dict[str, Any]) -> None:
    """DVC deletes the outputs before a stage runs; a stage that fails may leave new ones."""
    Path("rounds/r0/reward/metrics.json").unlink()
    assert current(entries) == {"sft", "gate_sft"}
    write_text(Path("rounds/r0/reward/metrics.json"), '{"loss": 2}')
    assert current(entries) == {"sft", "gate_sft"}


def test_behind_a_gate_that_stopped_the_run_there_are_no_results(entries: dict[str, Any]) -> None:
    """DVC keeps the gate's entry of the last time that it passed."""
    verdict = {"gate": "sft", "round": "r0", "policy": "block", "passed": False, "checks": []}
    path = Path("reports/r0/gate_sft.json")
    write_json(path, verdict | {"may_continue": False, "approval": None})
    assert current(entries) == {"sft"}
    write_json(path, verdict | {"may_continue": True, "approval": None})
    assert current(entries) == {*STAGES}


def test_what_a_run_did_not_reach_is_none_of_its_results(entries: dict[str, Any]) -> None:
    assert current(entries, unfinished={"reward@r0"}) == {"sft", "gate_sft"}


def test_ended_rounds_are_history(entries: dict[str, Any]) -> None:
    """Whatever has become of the stages that all rounds share."""
    entries["sft@r0"]["deps"].append(made("assets/model", "old"))
    write_text(Path("rounds/r0/params.yaml"), "seed: 0\n")
    entries["assets"] = {"outs": [made("assets/model", "new")]}
    assert current(entries, unfinished={"ppo@r0"}) == {"assets", *STAGES}
