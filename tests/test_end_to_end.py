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


def run(*command: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=command_environment()
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_both_rounds_then_nothing_to_do_then_one_gate(
    clone: Path, forking_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rondo = (sys.executable, "-m", "flows.cli")
    # neither policy is promoted, which does not keep the second round from learning; who is
    # approved is the champion that it meets
    output = run(
        *rondo, "run", "--preset", "tiny", "--set", "gates.promote.policy=ask", cwd=clone, code=3
    )
    assert (
        "win rate against SFT" in output
        and "Not promoted; the next round learns from its badcases." in output
    )
    assert read(clone / "rounds/r1/evaluate/metrics.json")["champion_round"] is None
    # the first run had a fork server of its own; what follows shares that of the tests
    monkeypatch.setenv(fork_server.VARIABLE, forking_python)
    run(*rondo, "approve", "promote", "r0", "--reason", "a test", cwd=clone)
    run(*rondo, "run", cwd=clone, code=3)
    run(*rondo, "approve", "promote", "r1", "--reason", "a test", cwd=clone)
    output = run(forking_python, "-m", "dvc", "repro", cwd=clone)
    stages_run = re.findall(r"Running stage '(\w+)@", output)  # those that read approvals/
    assert set(stages_run) == {"gate_sft", "gate_reward", "gate_promote", "champion"}
    assert read(clone / "rounds/r1/evaluate/metrics.json")["champion_round"] == "r0"

    # every stage of every round left its three files, and every gate its mark
    for name in ("r0", "r1"):
        for stage in ("sft", "reward", "battery", "ppo", "evaluate"):
            for file in ("metrics.json", "metrics.jsonl", "manifest.json"):
                assert (clone / "rounds" / name / stage / file).stat().st_size > 0
        for gate in ("sft", "reward", "promote"):
            assert (clone / "gates" / name / f"{gate}.ok").read_text() == "passed\n"
            assert read(clone / "reports" / name / f"gate_{gate}.json")["may_continue"]

    first, second = clone / "rounds/r0", clone / "rounds/r1"
    # one template and one evaluation set in all stages and rounds
    stages = ("prepare", "sft", "reward", "battery", "ppo", "evaluate", "replay")
    assert (
        len(
            {
                read(folder / stage / "manifest.json")["template_hash"]
                for folder in (first, second)
                for stage in stages
            }
        )
        == 1
    )
    assert (
        read(first / "prepare/manifest.json")["evaluation_hash"]
        == read(second / "prepare/manifest.json")["evaluation_hash"]
    )
    # people label what the reward models learn from, replayed pairs among it
    for folder in (first, second):
        assert (folder / "annotate/data/pairs_train.jsonl").read_bytes() == (
            folder / "prepare/data/pairs_train.jsonl"
        ).read_bytes()
    # the second round goes on from the first, meets its champion, and tries its badcases again
    assert read(second / "sft/manifest.json")["started_from"] == "rounds/r0/sft/model"
    assert "champion" not in read(first / "evaluate/metrics.json") and "champion" in read(
        second / "evaluate/metrics.json"
    )
    assert read(first / "replay/metrics.json")["badcases"] > 0
    assert (
        read(second / "replay/metrics.json")["retested"]
        == read(first / "replay/metrics.json")["badcases"]
    )
    # replay reached the next round's data, under its badcase's id, and no evaluation prompt did
    replayed = [
        json.loads(line)
        for line in (second / "prepare/data/prompts_train.jsonl").read_text().splitlines()
    ]
    assert any("badcase" in row for row in replayed)
    frozen = {
        json.loads(line)["prompt"]
        for line in (second / "prepare/data/eval_prompts.jsonl").read_text().splitlines()
    }
    assert not frozen & {row["prompt"] for row in replayed}

    # by hand: nothing to do; a changed threshold reruns its two gates alone; one that blocks stops
    # with the gate's name
    output = run(forking_python, "-m", "dvc", "repro", cwd=clone)
    assert re.findall(r"Running stage '(.*)'", output) == ["inputs"]  # which always looks
    params = (clone / "params.yaml").read_text()
    (clone / "params.yaml").write_text(params.replace("loss_drop: 0.2", "loss_drop: 0.3"))
    output = run(forking_python, "-m", "dvc", "repro", cwd=clone)
    assert re.findall(r"Running stage '(.*)'", output) == [
        "inputs",
        "gate_sft@r0",
        "gate_sft@r1",
    ]
    (clone / "params.yaml").write_text(params.replace("policy: warn", "policy: block"))
    run(forking_python, "-m", "dvc", "repro", cwd=clone, code=255)
    assert (
        not (clone / "gates/r0/sft.ok").exists()
        and not read(clone / "reports/r0/gate_sft.json")["passed"]
    )
    # put back, the gate comes from DVC's cache, with the verdict of that time
    (clone / "params.yaml").write_text(params)
    assert "Stage 'gate_sft@r0' is cached" in run(
        forking_python, "-m", "dvc", "repro", "gate_sft@r0", cwd=clone
    )
    assert read(clone / "reports/r0/gate_sft.json")["may_continue"]
    # r0 has ended: a changed setting runs r1's gate alone
    output = run(*rondo, "run", "--set", "gates.sft.loss_drop=0.31", cwd=clone)
    assert "ended, not run again (--rerun does): r0" in output
    assert re.findall(r"\[(.*)\] ran", output) == ["gate_sft@r1"]
    assert "r0" not in run(forking_python, "-m", "dvc", "status", cwd=clone)
    # every stage that has once been run comes from the cache: the lock is gone, the results are not
    # computed again
    (clone / "dvc.lock").unlink()
    output = run(forking_python, "-m", "dvc", "repro", "ppo@r1", cwd=clone)
    assert re.findall(r"Running stage '(.*)'", output) == ["inputs"]
    assert "Stage 'ppo@r1' is cached" in output
