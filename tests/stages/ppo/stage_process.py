"""The stage ppo of round r0 as a process of its own, which tests kill and start again."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from flows.execution import fork_server
from stages.lib.core.files import read_jsonl, write_jsonl
from tests.paths import ROOT

OUTPUTS = Path("rounds/r0/ppo")


def double_prompts() -> None:
    """Twice as many training prompts, enough for six per update."""
    path = Path("rounds/r0/prepare/data/prompts_train.jsonl")
    rows = read_jsonl(path, "")
    more = [row | {"id": f"{row['id']}-2", "prompt": f"{row['prompt']} and"} for row in rows]
    write_jsonl(path, rows + more)


def start(python: str = sys.executable) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [python, "-m", "stages.ppo", "--round", "r0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_to_the_end() -> str:
    """The output of a run, which imports its libraries by the fork server."""
    process = start(fork_server.python())
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def wait_for_updates(process: subprocess.Popen[str], updates: int) -> None:
    """Wait until its metrics have `updates` lines: it is then saving, or in its next update."""
    metrics = OUTPUTS / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < updates:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)


def delete_outputs() -> None:
    """As DVC does before it runs a stage again."""
    shutil.rmtree(OUTPUTS)


def outputs() -> dict[str, bytes]:
    return {
        str(path.relative_to(OUTPUTS)): path.read_bytes()
        for path in sorted(OUTPUTS.rglob("*"))
        if path.is_file()
    }
