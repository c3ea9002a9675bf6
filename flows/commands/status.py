"""`rondo status`: the state of each stage and round, and the next step, for a terminal."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core import tables
from flows.core.addresses import split_address
from flows.core.locks import Locks, current_locks, is_here
from flows.core.run_locks import is_alive
from flows.execution import dvc_stages
from flows.execution.worktree import ENDED, workspaces
from flows.report import diagnosis, round_files
from stages.lib.core.ended_rounds import ended_names, settings_path
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import StepRow, read_rows

NOT_UP_TO_DATE = "to do"
RECORDED = "recorded"
ABOUT_RECORDED = (
    f"{RECORDED}: the numbers of an earlier run; its models and samples are not in this folder: "
    "`dvc pull` fetches them if there is a remote, `rondo run` makes them again"
)


def text(home: Path) -> str:
    """A table with a row per stage and a column per round; below it the verdicts, and the runs that
    have a workspace.
    """
    ended = ended_names()
    rounds = [name for name in load_params().rounds if name not in ended]
    current = running_stage()
    addresses = dvc_stages.stage_order(rounds) if current else []
    # `dvc status` fails while DVC runs: then all stages after the running one count as to do
    if current in addresses:
        todo = set(addresses[addresses.index(current) :])
    else:
        addresses, todo = dvc_stages.order_and_changes(rounds)
    locks = current_locks()
    table = Table(box=SIMPLE_HEAD)
    for column in ("", *rounds):
        table.add_column(column)
    by_stage: dict[str, list[str]] = {}
    for address in addresses:
        by_stage.setdefault(split_address(address)[0], []).append(
            state(address, current, todo, locks)
        )
    for stage, states in by_stage.items():
        table.add_row(stage, *states)
    of_ended = [f"{name} has ended; {settings_path(name)}" for name in sorted(ended)]
    recorded = [ABOUT_RECORDED] if any(RECORDED in states for states in by_stage.values()) else []
    table_text, verdict_lines = tables.render_text(table), diagnosis.verdict_lines(rounds, locks)
    lines = [table_text, *recorded, *of_ended, *verdict_lines, *workspace_lines(home)]
    return "\n".join([*lines, "All numbers: `rondo report`; in the browser: `rondo up`."])


def state(address: str, current: str | None, todo: set[str], locks: Locks) -> str:
    """A cell of the table; `current` is the running stage, `locks` has those with results."""
    stage, round_ = split_address(address)
    if address == current:
        return f"runs{progress(round_, stage)}"
    verdict = (
        round_files.verdicts(round_, locks).get(stage.removeprefix("gate_"))
        if stage.startswith("gate_")
        else None
    )
    if verdict and not verdict["may_continue"]:
        return "failed"
    if address not in todo:
        return "done"
    return RECORDED if address in locks and not is_here(locks[address]) else NOT_UP_TO_DATE


def running_stage() -> str | None:
    """The stage that DVC runs in this folder."""
    pattern = re.compile(r"(?: repro|/flows/execution/repro\.py) (?:-\S+ )*([^-\s]\S*)")
    matches = (pattern.search(command) for command in dvc_stages.running_commands())
    return next((match[1] for match in matches if match), None)


def progress(round_: str, stage: str) -> str:
    """`: step 12, loss 0.3`, from the last row of metrics.jsonl; empty if there is none."""
    path = stage_dir(round_, stage) / "metrics.jsonl"
    command = f"dvc repro -f {stage}@{round_}"
    rows = read_rows(StepRow, path, command, growing=True) if path.exists() else []
    if not rows:
        return ""
    last: Mapping[str, Any] = rows[-1]
    metrics = [
        f"{name} {last[name]:.3g}"
        for name in ("score_mean", "judge_score_mean", "kl", "loss")
        if isinstance(last.get(name), float)
    ]
    return ", ".join([f": step {last['step']}", *metrics])


def workspace_lines(home: Path) -> list[str]:
    """A line for each run with a workspace: whether it ended, and the folder."""
    lines = []
    for folder in workspaces(home):
        if is_alive(home, folder.name):
            run_state = "runs"
        elif (folder / ENDED).exists():
            run_state = "ended"
        else:
            run_state = "waits for a decision, or was interrupted"
        lines.append(f"runs/{folder.name}: {run_state}; {folder}")
    return lines
