"""Measures the seconds from *Cancel* to the end of a run.

Start `rondo up` in one terminal, then `python docs/bench/cancel.py [TIMES]` in another. Each time,
a run of the tiny model is started through Prefect's API and cancelled while SFT trains. The run has
ended when no process works in its folder.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import cast

import psutil

from flows.commands.run import configure_prefect
from flows.execution.worktree import WORKSPACES

configure_prefect()  # before Prefect is imported
from prefect.client.schemas.objects import FlowRun  # noqa: E402
from prefect.deployments import run_deployment  # noqa: E402
from prefect.states import Cancelling  # noqa: E402

from flows.orchestration.prefect_requests import set_state  # noqa: E402

ENDLESS = {
    "preset": "tiny",
    "rounds": 1,
    "settings": ["sft.num_train_epochs=100000", "sft.max_steps=null"],
}
FOLDERS = Path(".rondo").resolve() / WORKSPACES


def working_commands() -> list[list[str]]:
    """Command lines of the processes in the folder of a run: the run itself, DVC, the stage."""
    return [
        process.info["cmdline"] or []
        for process in psutil.process_iter(["cwd", "cmdline"])
        if str(process.info["cwd"]).startswith(str(FOLDERS))
    ]


def seconds_to_cancel() -> float:
    """Start a run, cancel it, and return the seconds until its last process has ended."""
    run = cast(
        FlowRun, run_deployment("rlhf-pipeline/rlhf-pipeline", parameters=ENDLESS, timeout=0)
    )
    while not any("stages.sft" in command for command in working_commands()):
        time.sleep(0.5)
    time.sleep(5)  # SFT loads its model and begins to train
    start = time.monotonic()
    set_state(run.id, Cancelling())
    while working_commands():
        time.sleep(0.05)
    return time.monotonic() - start


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seconds = [seconds_to_cancel() for _ in range(times)]
    listed = ", ".join(f"{value:.1f}" for value in seconds)
    print(f"seconds: {listed}; median {statistics.median(seconds):.1f}")
