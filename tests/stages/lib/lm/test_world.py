"""The functions of world.py in two processes."""

import json
import os
import subprocess
import sys

from tests.paths import ROOT

LAUNCH = """
import sys
from stages.lib.core.launch import launch
sys.exit(launch("tests.stages.lib.lm.world_program", [], 2))
"""


def test_two_processes_share_their_work_and_come_to_the_same_results() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # two GPUs would be needed
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    assert results["size"] == 2
    assert results["shares"] == [[0, 1], [2, 3, 4]]
    assert results["gathered"] == [0, 1, 1]
    assert results["any"] == [False, True]
    assert results["sums"] == [[3.0], [[10.0, 10.0], [10.0, 10.0]]]
    assert results["callers"] == [["main", 0, 1]] * 2
    assert results["errors"] == ["BadInput: the judge is away"] * 2
    assert all(message.startswith("RondoError: ValueError: <") for message in results["unsent"])
    assert len(results["unsent"]) == 2
    assert results["equal"] == ""
    for message in results["unequal"]:
        assert "differ in update 1: kl (0, 1)." in message
    # batches are the same in any number of processes, so the bits are
    assert results["together"] == results["alone"]
    names = ("score", "kl", "ref_logprob")
    assert all(row[name] for row in results["together"]["scored"] for name in names)
    assert all(results["together"]["scores"]) and len(results["together"]["responses"]) == 3
