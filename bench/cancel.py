"""How long a run lives after *Cancel*: `rondo up` in one terminal, `python bench/cancel.py [TIMES]`
in another.

Each time a run of the tiny model is started by Prefect's API, cancelled as SFT trains, and looked
for until no process works in its folder.
"""

import statistics
import sys
import time
from pathlib import Path

import psutil

from flows.core.prefect_api import ask, set_state
from flows.execution.worktree import WORKSPACES

ENDLESS = {
    "preset": "tiny",
    "rounds": 1,
    "settings": ["sft.num_train_epochs=100000", "sft.max_steps=null"],
}
FOLDERS = Path(".rondo").resolve() / WORKSPACES


def at_work() -> list[list[str]]:
    """Command lines of what works in a run's folder: the run itself, DVC, the stage."""
    found = psutil.process_iter(["cwd", "cmdline"])
    return [
        each.info["cmdline"] or []
        for each in found
        if str(each.info["cwd"]).startswith(str(FOLDERS))
    ]


def cancelled() -> float:
    """Seconds from the word to the end."""
    deployment = ask("deployments/name/rlhf-pipeline/rlhf-pipeline")["id"]
    run = ask(f"deployments/{deployment}/create_flow_run", {"parameters": ENDLESS})["id"]
    while not any("stages.sft" in command for command in at_work()):
        time.sleep(0.5)
    time.sleep(5)  # it trains
    start = time.monotonic()
    set_state(run, {"type": "CANCELLING"})
    while at_work():
        time.sleep(0.05)
    return time.monotonic() - start


if __name__ == "__main__":
    taken = [cancelled() for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)]
    print(
        f"seconds: {', '.join(f'{each:.1f}' for each in taken)}; median {statistics.median(taken):.1f}"
    )
