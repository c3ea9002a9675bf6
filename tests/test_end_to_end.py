"""The shipped pipeline itself, every stage of both rounds, on a random 2-layer Llama: `rondo run
--preset tiny` in a fresh clone.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.execution import fork_server
from flows.execution.dvc_stages import command_environment
from tests.browser import look_at_results

RONDO = (sys.executable, "-m", "flows.cli")
ROUNDS = ("r0", "r1")


def run(*command: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=command_environment()
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_rounds_then_nothing_to_do_then_one_gate(
    clone: Path, forking_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # neither policy is promoted, which does not keep the second round from learning; who is
    # approved is the champion that it meets
    ask = ("--preset", "tiny", "--set", "gates.promote.policy=ask")
    output = run(*RONDO, "run", *ask, cwd=clone, code=3)
    assert (
        "win rate against SFT" in output
        and "Not promoted; the next round learns from its badcases." in output
    )
    assert read(clone / "rounds/r1/evaluate/metrics.json")["champion_round"] is None
    look_at_results(clone)
    # the first run had a fork server of its own; what follows shares that of the tests
    monkeypatch.setenv(fork_server.VARIABLE, forking_python)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    run(*RONDO, "approve", "promote", "r0", "--reason", "a test", cwd=clone)
    run(forking_python, "-m", "dvc", "repro", cwd=clone, code=255)  # r1 waits for its decision
    run(*RONDO, "approve", "promote", "r1", "--reason", "a test", cwd=clone)
    output = run(forking_python, "-m", "dvc", "repro", cwd=clone)
    stages_run = re.findall(r"Running stage '(\w+)@", output)  # those that read approvals/
    assert set(stages_run) == {"gate_sft", "gate_reward", "gate_promote", "champion"}
    assert read(clone / "rounds/r1/evaluate/metrics.json")["champion_round"] == "r0"

    check_every_stage_left_its_files(clone)
    check_rounds_share_template_and_evaluation_set(clone)
    check_people_label_all_pairs(clone)
    check_second_round_continues_the_first(clone)
    check_replay_without_evaluation_prompts(clone / "rounds/r1/prepare/data")

    # by hand there is nothing to do
    output = run(forking_python, "-m", "dvc", "repro", cwd=clone)
    assert re.findall(r"Running stage '(.*)'", output) == ["inputs"]  # which always looks
    # r0 has ended: a changed setting runs r1's gate alone; DVC by hand would run r0's, too
    output = run(*RONDO, "run", "--set", "gates.sft.loss_drop=0.31", cwd=clone)
    assert "ended, not run again (--rerun does): r0" in output
    assert re.findall(r"\[(.*)\] ran", output) == ["gate_sft@r1"]
    status = run(forking_python, "-m", "dvc", "status", cwd=clone)
    assert re.findall(r"^(\w+@\w+):", status, re.MULTILINE) == ["gate_sft@r0"]
    # every stage that has once been run comes from the cache: the lock is gone, the results are not
    # computed again
    (clone / "dvc.lock").unlink()
    output = run(forking_python, "-m", "dvc", "repro", "ppo@r1", cwd=clone)
    assert re.findall(r"Running stage '(.*)'", output) == ["inputs", "gate_sft@r0"]
    assert "Stage 'ppo@r1' is cached" in output


def check_every_stage_left_its_files(clone: Path) -> None:
    """Each stage of each round its three, and each gate its mark."""
    for name in ROUNDS:
        for stage in ("sft", "reward", "battery", "ppo", "evaluate"):
            for file in ("metrics.json", "metrics.jsonl", "manifest.json"):
                assert (clone / "rounds" / name / stage / file).stat().st_size > 0
        for gate in ("sft", "reward", "promote"):
            assert (clone / "gates" / name / f"{gate}.ok").read_text() == "passed\n"
            assert read(clone / "reports" / name / f"gate_{gate}.json")["may_continue"]


def check_rounds_share_template_and_evaluation_set(clone: Path) -> None:
    stages = ("prepare", "sft", "reward", "battery", "ppo", "evaluate", "replay")
    manifests = {
        (name, stage): read(clone / "rounds" / name / stage / "manifest.json")
        for name in ROUNDS
        for stage in stages
    }
    assert len({manifest["template_hash"] for manifest in manifests.values()}) == 1
    assert len({manifests[name, "prepare"]["evaluation_hash"] for name in ROUNDS}) == 1


def check_people_label_all_pairs(clone: Path) -> None:
    """Those that the reward models learn from, replayed pairs among them."""
    for name in ROUNDS:
        annotated, prepared = (
            clone / "rounds" / name / stage / "data/pairs_train.jsonl"
            for stage in ("annotate", "prepare")
        )
        assert annotated.read_bytes() == prepared.read_bytes()


def check_second_round_continues_the_first(clone: Path) -> None:
    """It trains the first one's SFT model, meets its champion, and tries its badcases again."""
    first, second = clone / "rounds/r0", clone / "rounds/r1"
    assert read(second / "sft/manifest.json")["started_from"] == "rounds/r0/sft/model"
    assert "champion" not in read(first / "evaluate/metrics.json")
    assert "champion" in read(second / "evaluate/metrics.json")
    badcases = read(first / "replay/metrics.json")["badcases"]
    assert badcases > 0
    assert read(second / "replay/metrics.json")["retested"] == badcases


def check_replay_without_evaluation_prompts(data: Path) -> None:
    """Replay reached the round's data, under its badcase's id, and no evaluation prompt did."""
    prompts = rows(data / "prompts_train.jsonl")
    assert any("badcase" in row for row in prompts)
    frozen = {row["prompt"] for row in rows(data / "eval_prompts.jsonl")}
    assert not frozen & {row["prompt"] for row in prompts}
